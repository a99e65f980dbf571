// SPDX-License-Identifier: Apache-2.0
#include "network.h"

#include "dataset.h"

#include <math.h>
#include <string.h>

static const size_t kAlignment = 512; /* of suballocations, as PyTorch's caching allocator has it */

static CUdeviceptr carve(CUdeviceptr block, size_t* used, size_t size) {
    const CUdeviceptr part = block + *used;
    *used += (size + kAlignment - 1) / kAlignment * kAlignment;
    return part;
}

/* Lay the arrays out from `state` and `work` on; with both 0 this only measures the two sizes. */
static void place(struct network* net, CUdeviceptr state, CUdeviceptr work) {
    const size_t wide = net->parameters * sizeof(float);
    const size_t batch = (size_t)net->batch;
    net->state_size = net->work_size = 0;
    net->weights = carve(state, &net->state_size, wide);
    net->rounded = carve(state, &net->state_size, net->parameters * sizeof(uint16_t));
    net->first = carve(state, &net->state_size, wide);
    net->second = carve(state, &net->state_size, wide);
    net->gradients = carve(state, &net->state_size, wide);
    for (int l = 0; l < kLayers; ++l) {
        const size_t size = batch * (size_t)net->layers[l].out * sizeof(float);
        net->activations[l] = carve(work, &net->work_size, size);
        net->deltas[l] = carve(work, &net->work_size, size);
    }
    net->sample_loss = carve(work, &net->work_size, batch * sizeof(float));
    net->loss = carve(work, &net->work_size, sizeof(float));
}

static uint16_t round_to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Uniform weights within +-sqrt(3 / in), zero biases, written in pieces that fit the staging
 * buffer. */
static void draw_weights(struct network* net, uint64_t seed, void* staging, size_t staging_size) {
    uint64_t state = seed ^ 0x7765696768747321u; /* apart from the data's sequences */
    const size_t piece = staging_size / (sizeof(float) + sizeof(uint16_t));
    float* wide = staging;
    uint16_t* narrow = (uint16_t*)(wide + piece);
    size_t at = 0, l = 0;
    while (at < net->parameters) {
        const size_t count = net->parameters - at < piece ? net->parameters - at : piece;
        for (size_t i = 0; i < count; ++i) {
            while (l + 1 < kLayers && at + i >= net->layers[l + 1].at)
                ++l;
            const struct layer* layer = &net->layers[l];
            const size_t inside = at + i - layer->at;
            const int is_bias = inside >= (size_t)layer->in * (size_t)layer->out;
            wide[i] = is_bias ? 0.0f : next_uniform(&state) * sqrtf(3.0f / (float)layer->in);
            narrow[i] = round_to_bf16(wide[i]);
        }
        CUDA(cuMemcpyHtoDAsync, net->weights + at * sizeof *wide, wide, count * sizeof *wide,
             net->stream);
        CUDA(cuMemcpyHtoDAsync, net->rounded + at * sizeof *narrow, narrow, count * sizeof *narrow,
             net->stream);
        CUDA(cuStreamSynchronize, net->stream);
        at += count;
    }
}

void start_network(struct network* net, const char* module_path, int hidden, int batch,
                   uint64_t seed, CUstream stream, void* staging, size_t staging_size) {
    const int widths[kLayers + 1] = {kFeatures, hidden, hidden, kClasses};
    memset(net, 0, sizeof *net);
    net->batch = batch;
    net->stream = stream;
    for (int l = 0; l < kLayers; ++l) {
        net->layers[l] = (struct layer){widths[l], widths[l + 1], net->parameters};
        net->parameters += (size_t)(widths[l] + 1) * (size_t)widths[l + 1];
    }
    CUDA(cuModuleLoad, &net->module, module_path);
    CUDA(cuModuleGetFunction, &net->forward, net->module, "linear_forward");
    CUDA(cuModuleGetFunction, &net->softmax, net->module, "softmax_loss");
    CUDA(cuModuleGetFunction, &net->mean, net->module, "mean");
    CUDA(cuModuleGetFunction, &net->backward_input, net->module, "linear_backward_input");
    CUDA(cuModuleGetFunction, &net->backward_weight, net->module, "linear_backward_weight");
    CUDA(cuModuleGetFunction, &net->adam, net->module, "adam");

    place(net, 0, 0);
    CUDA(cuMemAlloc, &net->state_block, net->state_size);
    CUDA(cuMemAlloc, &net->work_block, net->work_size);
    CUDA(cuMemsetD8, net->state_block, 0, net->state_size);
    CUDA(cuMemsetD8, net->work_block, 0, net->work_size);
    place(net, net->state_block, net->work_block);
    draw_weights(net, seed, staging, staging_size);
}

static void launch(struct network* net, CUfunction kernel, size_t threads, void** arguments) {
    enum { kBlock = 128 };
    const unsigned blocks = (unsigned)((threads + kBlock - 1) / kBlock);
    CUDA(cuLaunchKernel, kernel, blocks, 1, 1, kBlock, 1, 1, 0, net->stream, arguments, NULL);
}

static void queue_forward(struct network* net, CUdeviceptr x) {
    for (int l = 0; l < kLayers; ++l) {
        struct layer layer = net->layers[l];
        CUdeviceptr weight = net->rounded + layer.at * sizeof(uint16_t);
        CUdeviceptr bias =
            net->weights + (layer.at + (size_t)layer.in * (size_t)layer.out) * sizeof(float);
        CUdeviceptr input = l == 0 ? x : net->activations[l - 1];
        int rectify = l + 1 < kLayers;
        void* arguments[] = {&weight,     &bias,     &input,     &net->activations[l],
                             &net->batch, &layer.in, &layer.out, &rectify};
        launch(net, net->forward, (size_t)net->batch * (size_t)layer.out, arguments);
    }
}

static void queue_backward(struct network* net, CUdeviceptr x) {
    for (int l = kLayers - 1; l >= 0; --l) {
        struct layer layer = net->layers[l];
        CUdeviceptr input = l == 0 ? x : net->activations[l - 1];
        CUdeviceptr dweight = net->gradients + layer.at * sizeof(float);
        CUdeviceptr dbias = dweight + (size_t)layer.in * (size_t)layer.out * sizeof(float);
        void* for_weight[] = {&net->deltas[l], &input,    &dweight,  &dbias,
                              &net->batch,     &layer.in, &layer.out};
        launch(net, net->backward_weight, (size_t)(layer.in + 1) * (size_t)layer.out, for_weight);
        if (l == 0)
            break; /* nobody asks for the gradient of the data */
        CUdeviceptr weight = net->rounded + layer.at * sizeof(uint16_t);
        void* for_input[] = {&weight,     &net->deltas[l], &input,    &net->deltas[l - 1],
                             &net->batch, &layer.in,       &layer.out};
        launch(net, net->backward_input, (size_t)net->batch * (size_t)layer.in, for_input);
    }
}

void queue_step(struct network* net, long step, CUdeviceptr x, CUdeviceptr labels) {
    queue_forward(net, x);
    int classes = kClasses;
    void* for_loss[] = {&net->activations[kLayers - 1], &labels,     &net->sample_loss,
                        &net->deltas[kLayers - 1],      &net->batch, &classes};
    launch(net, net->softmax, (size_t)net->batch, for_loss);
    void* for_mean[] = {&net->sample_loss, &net->loss, &net->batch};
    launch(net, net->mean, 1, for_mean);
    queue_backward(net, x);

    /* Bias corrections folded into the step size, as in section 2 of the Adam paper. */
    float rate = (float)(1e-3 * sqrt(1 - pow(0.999, (double)step)) / (1 - pow(0.9, (double)step)));
    float epsilon = 1e-8f;
    int count = (int)net->parameters;
    void* for_adam[] = {&net->weights, &net->rounded, &net->gradients, &net->first,
                        &net->second,  &rate,         &epsilon,        &count};
    launch(net, net->adam, net->parameters, for_adam);
}

void end_network(struct network* net) {
    CUDA(cuMemFree, net->state_block);
    CUDA(cuMemFree, net->work_block);
    CUDA(cuModuleUnload, net->module);
}
