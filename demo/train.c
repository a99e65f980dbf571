// SPDX-License-Identifier: Apache-2.0
/* The demo's GPU job: trains a small network with Adam through the CUDA driver API.
 *
 * It knows nothing of checkpoints. It lays GPU memory out as training jobs do (weights in fp32 and
 * bf16, two Adam moments, gradients, activations, the training data, a large pool that is reserved
 * and untouched), uses a stream, events and page-locked host memory, and writes at the end every
 * loss to the bit, a hash of the weights, and whether the memory it never wrote to is still what it
 * was. */
#include "cuda_driver.h"
#include "dataset.h"
#include "network.h"
#include "options.h"
#include "sha256.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kStaging = 4 << 20 }; /* bytes of page-locked host memory for copies */

struct job {
    struct options options;
    struct dataset data;
    struct network net;
    CUcontext context;
    CUstream stream;
    CUevent loss_ready;
    char gpu[256];
    int driver_version;
    void* staging;
    volatile float* loss; /* page-locked; the GPU writes it */
    float* scratch;       /* kStaging bytes of ordinary memory */
    CUdeviceptr samples, labels, pool;
    size_t sample_count, sample_size, label_size, pool_size;
    float* losses;
};

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void* allocate(size_t size) {
    void* memory = calloc(1, size);
    if (!memory) {
        fprintf(stderr, "train: no memory for %zu bytes\n", size);
        exit(5);
    }
    return memory;
}

static size_t gpu_bytes(const struct job* job) {
    return job->sample_size + job->label_size + job->pool_size + job->net.state_size +
           job->net.work_size;
}

static void start_gpu(struct job* job) {
    CUdevice device;
    load_cuda_driver();
    CUDA(cuInit, 0);
    CUDA(cuDriverGetVersion, &job->driver_version);
    CUDA(cuDeviceGet, &device, 0);
    CUDA(cuDeviceGetName, job->gpu, (int)sizeof job->gpu, device);
    CUDA(cuDevicePrimaryCtxRetain, &job->context, device);
    CUDA(cuCtxSetCurrent, job->context);
    /* A blocking stream: it waits for the memsets, which go to the legacy default stream. */
    CUDA(cuStreamCreate, &job->stream, CU_STREAM_DEFAULT);
    CUDA(cuEventCreate, &job->loss_ready, CU_EVENT_DISABLE_TIMING);
    CUDA(cuMemHostAlloc, &job->staging, kStaging, 0);
    void* loss = NULL;
    CUDA(cuMemHostAlloc, &loss, sizeof *job->loss, 0);
    job->loss = loss;
    job->scratch = allocate(kStaging);
}

/* Samples per piece of the data that fits the staging buffer, features and labels apart. */
static size_t samples_per_piece(void) {
    return kStaging / (kFeatures * sizeof(float));
}

static void load_data(struct job* job) {
    const size_t row = kFeatures * sizeof(float);
    job->sample_size = (size_t)job->options.data_mib << 20;
    job->sample_count = job->sample_size / row;
    job->label_size = job->sample_count * sizeof(int);
    job->pool_size = (size_t)job->options.pool_mib << 20;
    CUDA(cuMemAlloc, &job->samples, job->sample_size);
    CUDA(cuMemAlloc, &job->labels, job->label_size);
    if (job->pool_size) {
        CUDA(cuMemAlloc, &job->pool, job->pool_size);
        CUDA(cuMemsetD8, job->pool, 0, job->pool_size);
    }
    start_dataset(&job->data, job->options.seed);
    int* labels = (int*)job->scratch;
    for (size_t at = 0; at < job->sample_count;) {
        const size_t left = job->sample_count - at;
        const size_t count = left < samples_per_piece() ? left : samples_per_piece();
        make_samples(&job->data, at, count, job->staging, labels);
        CUDA(cuMemcpyHtoDAsync, job->samples + at * row, job->staging, count * row, job->stream);
        CUDA(cuStreamSynchronize, job->stream);
        memcpy(job->staging, labels, count * sizeof(int));
        CUDA(cuMemcpyHtoDAsync, job->labels + at * sizeof(int), job->staging, count * sizeof(int),
             job->stream);
        CUDA(cuStreamSynchronize, job->stream);
        at += count;
    }
}

static FILE* open_or_die(const char* path) {
    FILE* file = fopen(path, "w");
    if (!file) {
        fprintf(stderr, "train: cannot write %s: %s\n", path, strerror(errno));
        exit(6);
    }
    return file;
}

/* Close a file written under a temporary name and give it its own: readers never see half of it. */
static void publish(FILE* file, const char* temporary, const char* path) {
    const int bad = ferror(file);
    if (fclose(file) != 0 || bad || rename(temporary, path) != 0) {
        fprintf(stderr, "train: cannot write %s: %s\n", path, strerror(errno));
        exit(6);
    }
}

static void temporary_name(char* out, size_t size, const char* path) {
    if ((size_t)snprintf(out, size, "%s.part", path) >= size) {
        fprintf(stderr, "train: path too long: %s\n", path);
        exit(6);
    }
}

static void write_mark(const char* path, long step) {
    char temporary[4096];
    temporary_name(temporary, sizeof temporary, path);
    FILE* file = open_or_die(temporary);
    fprintf(file, "%ld\n", step);
    publish(file, temporary, path);
}

/* Returns the seconds that a step took in the second half: the first pays for loading kernels. */
static double train(struct job* job) {
    const struct options* o = &job->options;
    const size_t batches = job->sample_count / (size_t)o->batch;
    double half_time = seconds_now();
    for (long step = 1; step <= o->steps; ++step) {
        if (step == o->steps / 2 + 1)
            half_time = seconds_now();
        const size_t first = (size_t)(step - 1) % batches * (size_t)o->batch;
        queue_step(&job->net, step, job->samples + first * kFeatures * sizeof(float),
                   job->labels + first * sizeof(int));
        CUDA(cuMemcpyDtoHAsync, (void*)job->loss, job->net.loss, sizeof *job->loss, job->stream);
        CUDA(cuEventRecord, job->loss_ready, job->stream);
        CUDA(cuEventSynchronize, job->loss_ready);
        job->losses[step - 1] = *job->loss;
        if (step % o->report_every == 0 || step == o->steps) {
            printf("step %ld of %ld: loss %.6f\n", step, o->steps, (double)*job->loss);
            fflush(stdout);
        }
        if (step == o->mark_step)
            write_mark(o->mark_file, step);
    }
    return (seconds_now() - half_time) / (double)(o->steps - o->steps / 2);
}

/* Copy `size` bytes of GPU memory into the staging buffer. */
static void fetch(struct job* job, CUdeviceptr from, size_t size) {
    CUDA(cuMemcpyDtoHAsync, job->staging, from, size, job->stream);
    CUDA(cuStreamSynchronize, job->stream);
}

static void hash_range(struct job* job, struct sha256* hash, CUdeviceptr from, size_t size) {
    for (size_t at = 0; at < size; at += kStaging) {
        const size_t piece = size - at < kStaging ? size - at : kStaging;
        fetch(job, from + at, piece);
        sha256_add(hash, job->staging, piece);
    }
}

static int data_is_intact(struct job* job) {
    const size_t row = kFeatures * sizeof(float);
    for (size_t at = 0; at < job->sample_count;) {
        const size_t left = job->sample_count - at;
        const size_t count = left < samples_per_piece() ? left : samples_per_piece();
        make_samples(&job->data, at, count, job->scratch, NULL);
        fetch(job, job->samples + at * row, count * row);
        if (memcmp(job->staging, job->scratch, count * row) != 0)
            return 0;
        at += count;
    }
    return 1;
}

static int pool_is_zero(struct job* job) {
    memset(job->scratch, 0, kStaging);
    for (size_t at = 0; at < job->pool_size; at += kStaging) {
        const size_t piece = job->pool_size - at < kStaging ? job->pool_size - at : kStaging;
        fetch(job, job->pool + at, piece);
        if (memcmp(job->staging, job->scratch, piece) != 0)
            return 0;
    }
    return 1;
}

static void write_result(struct job* job, double step_seconds) {
    const struct network* net = &job->net;
    struct sha256 hash;
    char weights[65], moments[65], temporary[4096];
    sha256_start(&hash);
    hash_range(job, &hash, net->weights, net->parameters * sizeof(float));
    hash_range(job, &hash, net->rounded, net->parameters * sizeof(uint16_t));
    sha256_finish(&hash, weights);
    sha256_start(&hash);
    hash_range(job, &hash, net->first, net->parameters * sizeof(float));
    hash_range(job, &hash, net->second, net->parameters * sizeof(float));
    sha256_finish(&hash, moments);
    const int data_intact = data_is_intact(job), pool_zero = pool_is_zero(job);
    printf("weights %s\nmoments %s\n", weights, moments);
    if (!job->options.result)
        return;

    temporary_name(temporary, sizeof temporary, job->options.result);
    FILE* file = open_or_die(temporary);
    fprintf(file, "{\n  \"gpu\": \"%s\",\n  \"driver_version\": %d,\n", job->gpu,
            job->driver_version);
    fprintf(file, "  \"steps\": %ld,\n  \"step_seconds\": %.9f,\n", job->options.steps,
            step_seconds);
    fprintf(file, "  \"gpu_bytes\": %zu,\n  \"parameters\": %zu,\n", gpu_bytes(job),
            net->parameters);
    fprintf(file, "  \"weights_sha256\": \"%s\",\n  \"moments_sha256\": \"%s\",\n", weights,
            moments);
    fprintf(file, "  \"data_intact\": %s,\n  \"pool_zero\": %s,\n  \"losses\": [",
            data_intact ? "true" : "false", pool_zero ? "true" : "false");
    for (long step = 0; step < job->options.steps; ++step)
        fprintf(file, "%s\"%a\"", step ? ", " : "", (double)job->losses[step]);
    fputs("]\n}\n", file);
    publish(file, temporary, job->options.result);
}

int main(int argc, char** argv) {
    struct job job = {.options = parse_options(argc, argv)};
    start_gpu(&job);
    load_data(&job);
    if (job.sample_count < (size_t)job.options.batch) {
        fputs("train: the data holds less than one batch\n", stderr);
        return 2;
    }
    start_network(&job.net, job.options.module, job.options.hidden, job.options.batch,
                  job.options.seed, job.stream, job.staging, kStaging);
    job.losses = allocate((size_t)job.options.steps * sizeof *job.losses);
    printf("training on %s: %zu parameters, %.1f MiB of GPU memory\n", job.gpu, job.net.parameters,
           (double)gpu_bytes(&job) / (1 << 20));
    fflush(stdout);

    write_result(&job, train(&job));

    end_network(&job.net);
    if (job.pool_size)
        CUDA(cuMemFree, job.pool);
    CUDA(cuMemFree, job.labels);
    CUDA(cuMemFree, job.samples);
    CUDA(cuMemFreeHost, (void*)job.loss);
    CUDA(cuMemFreeHost, job.staging);
    CUDA(cuEventDestroy, job.loss_ready);
    CUDA(cuStreamDestroy, job.stream);
    CUDA(cuDevicePrimaryCtxRelease, 0);
    free(job.losses);
    free(job.scratch);
    return 0;
}
