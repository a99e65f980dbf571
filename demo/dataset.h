// SPDX-License-Identifier: Apache-2.0
/* Synthetic classification data, a pure function of the seed: any part can be made again at any
 * time and compared with what the GPU holds. */
#ifndef GPUSTASIS_DEMO_DATASET_H
#define GPUSTASIS_DEMO_DATASET_H

#include <stddef.h>
#include <stdint.h>

enum { kFeatures = 256, kClasses = 16 };

struct dataset {
    uint64_t seed;
    float teacher[kClasses][kFeatures]; /* the label is the class whose row fits a sample best */
};

/* The next number of a splitmix64 sequence (Steele, Lea, Flood, 2014). */
uint64_t next_random(uint64_t* state);

/* Uniform in [-1, 1), in steps of 2^-23. */
float next_uniform(uint64_t* state);

void start_dataset(struct dataset* data, uint64_t seed);

/* Make the samples first .. first+count-1: features[count][kFeatures] in [-1, 1). labels[count] in
 * 0..kClasses-1, or NULL. */
void make_samples(const struct dataset* data, size_t first, size_t count, float* features,
                  int* labels);

#endif
