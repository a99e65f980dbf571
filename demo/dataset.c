// SPDX-License-Identifier: Apache-2.0
#include "dataset.h"

uint64_t next_random(uint64_t* state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

float next_uniform(uint64_t* state) {
    return (float)(int32_t)((uint32_t)(next_random(state) >> 40) - (1u << 23)) * 0x1p-23f;
}

void start_dataset(struct dataset* data, uint64_t seed) {
    data->seed = seed;
    uint64_t state = seed ^ 0x7465616368657221u; /* apart from the samples' own sequences */
    for (int c = 0; c < kClasses; ++c)
        for (int i = 0; i < kFeatures; ++i)
            data->teacher[c][i] = next_uniform(&state);
}

static int label_of(const struct dataset* data, const float* features) {
    int best = 0;
    float best_score = 0;
    for (int c = 0; c < kClasses; ++c) {
        float score = 0;
        for (int i = 0; i < kFeatures; ++i)
            score += data->teacher[c][i] * features[i];
        if (c == 0 || score > best_score) {
            best = c;
            best_score = score;
        }
    }
    return best;
}

void make_samples(const struct dataset* data, size_t first, size_t count, float* features,
                  int* labels) {
    for (size_t sample = 0; sample < count; ++sample) {
        uint64_t state = data->seed * 0x2545f4914f6cdd1du + (first + sample) * kFeatures;
        float* row = features + sample * kFeatures;
        for (int i = 0; i < kFeatures; ++i)
            row[i] = next_uniform(&state);
        if (labels)
            labels[sample] = label_of(data, row);
    }
}
