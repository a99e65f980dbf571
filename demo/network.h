// SPDX-License-Identifier: Apache-2.0
/* A perceptron with two hidden layers, its gradients and its Adam state, in GPU memory. */
#ifndef GPUSTASIS_DEMO_NETWORK_H
#define GPUSTASIS_DEMO_NETWORK_H

#include "cuda_driver.h"

#include <stddef.h>
#include <stdint.h>

enum { kLayers = 3 };

struct layer {
    int in, out;
    size_t at; /* of the layer's [out][in] weights and then its [out] biases, in parameters */
};

/* Parameters lie one after another in five arrays of `parameters` elements each, carved out of one
 * allocation as a caching allocator does. Activations have an allocation of their own. */
struct network {
    struct layer layers[kLayers];
    size_t parameters;
    int batch;
    CUstream stream;
    CUmodule module;
    CUfunction forward, softmax, mean, backward_input, backward_weight, adam;
    CUdeviceptr weights;              /* fp32 */
    CUdeviceptr rounded;              /* the same in bf16, what forward and backward read */
    CUdeviceptr first, second;        /* Adam's moments, fp32 */
    CUdeviceptr gradients;            /* fp32 */
    CUdeviceptr activations[kLayers]; /* outputs of the layers, [batch][out] fp32 */
    CUdeviceptr deltas[kLayers];      /* their gradients */
    CUdeviceptr sample_loss;          /* [batch] fp32 */
    CUdeviceptr loss;                 /* one fp32 */
    CUdeviceptr state_block, work_block;
    size_t state_size, work_size; /* bytes of the two allocations */
};

/* Allocate the network, load its kernels from `module_path` and put weights drawn from `seed` on
 * the GPU. `staging` is page-locked host memory of `staging_size` bytes. */
void start_network(struct network* net, const char* module_path, int hidden, int batch,
                   uint64_t seed, CUstream stream, void* staging, size_t staging_size);

/* Queue one training step (1, 2, ...) on samples x [batch][kFeatures] with labels [batch], both on
 * the GPU; net->loss holds the mean loss when the stream has got there. */
void queue_step(struct network* net, long step, CUdeviceptr x, CUdeviceptr labels);

void end_network(struct network* net);

#endif
