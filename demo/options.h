// SPDX-License-Identifier: Apache-2.0
/* Command line of the training demo. */
#ifndef GPUSTASIS_DEMO_OPTIONS_H
#define GPUSTASIS_DEMO_OPTIONS_H

#include <stdint.h>

struct options {
    const char* module;    /* kernels: PTX for a GPU, a module of host code for the emulator */
    const char* result;    /* JSON file written at the end, or NULL */
    const char* mark_file; /* written when step `mark_step` is done, or NULL */
    uint64_t seed;         /* of the data and of the first weights */
    long steps;            /* >= 1 */
    long mark_step;        /* 1..steps */
    long report_every;     /* steps between two lines of progress, >= 1 */
    long data_mib;         /* training data kept on the GPU, >= 1 */
    long pool_mib;         /* GPU memory that is taken, zeroed and never touched, >= 0 */
    int hidden;            /* width of the two hidden layers, 1..16384 */
    int batch;             /* samples a step, 1..4096 */
};

/* Parse argv. Prints what is wrong and exits with 2; prints the usage and exits with 0 on --help.
 */
struct options parse_options(int argc, char** argv);

#endif
