/* Kernels of the training demo, one source for two machines: nvcc makes PTX of it for a GPU, g++ makes
 * a module of host code for the driver emulator.
 *
 * Every output element is computed by one thread, in a fixed order, and no thread reads what another
 * of the same launch writes: no atomics, no shared memory, no barrier. So a run repeats to the bit on
 * one machine. (Between machines it need not: the compilers contract multiply and add differently.)
 *
 * Matrices are row-major. Weights are [out][in]; activations are [batch][features]. */

#include "gpustasis_emulator.h"

typedef unsigned short bf16;

__device__ inline float from_bf16(bf16 value) {
    union {
        unsigned int bits;
        float number;
    } wide;
    wide.bits = (unsigned int)value << 16;
    return wide.number;
}

/* Round to nearest, ties to even. Not for NaN, which training here never makes. */
__device__ inline bf16 to_bf16(float number) {
    union {
        float number;
        unsigned int bits;
    } wide;
    wide.number = number;
    return (bf16)((wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u)) >> 16);
}

/* y = x W^T + b, then max(y, 0) if `rectify`. One thread per element of y. */
GPUSTASIS_KERNEL(linear_forward, const bf16 *weight, const float *bias, const float *x, float *y, int batch,
       int in, int out, int rectify) {
    const int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= batch * out)
        return;
    const bf16 *w = weight + (long long)(index % out) * in;
    const float *row = x + (long long)(index / out) * in;
    float sum = bias[index % out];
    for (int i = 0; i < in; ++i)
        sum += from_bf16(w[i]) * row[i];
    y[index] = rectify && sum < 0.0f ? 0.0f : sum;
}

/* Cross entropy of softmax(logits) and its gradient, divided by the batch. One thread per sample. */
GPUSTASIS_KERNEL(softmax_loss, const float *logits, const int *label, float *loss, float *gradient, int batch,
       int classes) {
    const int sample = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (sample >= batch)
        return;
    const float *row = logits + (long long)sample * classes;
    float *out = gradient + (long long)sample * classes;
    float largest = row[0];
    for (int c = 1; c < classes; ++c)
        largest = row[c] > largest ? row[c] : largest;
    float sum = 0.0f;
    for (int c = 0; c < classes; ++c)
        sum += expf(row[c] - largest);
    for (int c = 0; c < classes; ++c)
        out[c] = (expf(row[c] - largest) / sum - (c == label[sample] ? 1.0f : 0.0f)) / (float)batch;
    loss[sample] = logf(sum) + largest - row[label[sample]];
}

/* The mean of `count` numbers, added up in order by one thread. */
GPUSTASIS_KERNEL(mean, const float *numbers, float *result, int count) {
    if (blockIdx.x * blockDim.x + threadIdx.x != 0)
        return;
    float sum = 0.0f;
    for (int i = 0; i < count; ++i)
        sum += numbers[i];
    *result = sum / (float)count;
}

/* dx = dy W, zero where the activation x was rectified away. One thread per element of dx. */
GPUSTASIS_KERNEL(linear_backward_input, const bf16 *weight, const float *dy, const float *x, float *dx, int batch,
       int in, int out) {
    const int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= batch * in)
        return;
    const int column = index % in;
    const float *row = dy + (long long)(index / in) * out;
    float sum = 0.0f;
    for (int o = 0; o < out; ++o)
        sum += row[o] * from_bf16(weight[(long long)o * in + column]);
    dx[index] = x[index] > 0.0f ? sum : 0.0f;
}

/* dW = dy^T x and, in column `in` of the launch, db. One thread per element of dW and db. */
GPUSTASIS_KERNEL(linear_backward_weight, const float *dy, const float *x, float *dweight, float *dbias, int batch,
       int in, int out) {
    const int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= out * (in + 1))
        return;
    const int o = index / (in + 1);
    const int i = index % (in + 1);
    float sum = 0.0f;
    for (int b = 0; b < batch; ++b)
        sum += dy[(long long)b * out + o] * (i < in ? x[(long long)b * in + i] : 1.0f);
    if (i < in)
        dweight[(long long)o * in + i] = sum;
    else
        dbias[o] = sum;
}

/* Adam (Kingma and Ba, 2015, algorithm 1) on fp32 weights; `rounded` receives their bf16 copy for the
 * next forward pass. rate is the step size with both bias corrections in it. One thread per weight. */
GPUSTASIS_KERNEL(adam, float *weight, bf16 *rounded, const float *gradient, float *first, float *second,
       float rate, float epsilon, int count) {
    const int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= count)
        return;
    const float g = gradient[index];
    const float m = 0.9f * first[index] + 0.1f * g;
    const float v = 0.999f * second[index] + 0.001f * g * g;
    const float w = weight[index] - rate * m / (sqrtf(v) + epsilon);
    first[index] = m;
    second[index] = v;
    weight[index] = w;
    rounded[index] = to_bf16(w);
}
