// SPDX-License-Identifier: Apache-2.0
/* One rank of a ring of processes with TCP between them and memory on a GPU.
 *
 *     ring_rank RANK STEPS ADDRESS:PORT...
 *
 * One address for each rank. It listens at its own, connects to the next rank's, and takes the connection
 * of the one before. In each step the sum of what all ranks bring is passed round the ring; each folds it
 * into its state, which is kept in GPU memory and compared with a copy, as is memory that it never changes. Prints "step K STATE" now and then
 * and "done STATE" at the end. All ranks end with the same state; ring_state of tests/support/ring.py is
 * the same sum. Whatever goes wrong is said, and ends it with status 1. After SIGUSR1 it sends nothing any
 * more, and waits: so do all ranks then.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <cuda.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { kWords = 1 << 16, kPause = 2000, kEvery = 20, kTries = 2000 };

static volatile sig_atomic_t hangs;

static void hang(int number) {
    (void)number;
    hangs = 1;
}

static void fail(const char* what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void require(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: error %d\n", call, (int)result);
    exit(1);
}

static struct sockaddr_in address_of(const char* text) {
    char host[64];
    const char* colon = strchr(text, ':');
    if (colon == NULL || (size_t)(colon - text) >= sizeof host)
        fail(text);
    memcpy(host, text, (size_t)(colon - text));
    host[colon - text] = 0;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)atoi(colon + 1))};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1)
        fail(text);
    return address;
}

static void send_word(int to, uint64_t word) {
    for (size_t sent = 0; sent < sizeof word;) {
        const ssize_t count = send(to, (char*)&word + sent, sizeof word - sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EINTR)
            fail("send");
        sent += count < 0 ? 0 : (size_t)count;
    }
}

static uint64_t receive_word(int from) {
    uint64_t word = 0;
    for (size_t got = 0; got < sizeof word;) {
        const ssize_t count = recv(from, (char*)&word + got, sizeof word - got, 0);
        if (count == 0) {
            fprintf(stderr, "the rank before has closed its connection\n");
            exit(1);
        }
        if (count < 0 && errno != EINTR)
            fail("recv");
        got += count < 0 ? 0 : (size_t)count;
    }
    return word;
}

/* Memory on the GPU with these words, and place to read it to. */
struct Kept {
    CUdeviceptr memory;
    uint64_t *words, *read;
};

static struct Kept keep(uint64_t seed) {
    struct Kept kept = {.words = calloc(kWords, sizeof(uint64_t)),
                        .read = calloc(kWords, sizeof(uint64_t))};
    for (size_t at = 0; seed != 0 && at < kWords; ++at)
        kept.words[at] = seed = seed * 6364136223846793005u + 1442695040888963407u;
    require(cuMemAlloc(&kept.memory, kWords * sizeof(uint64_t)), "cuMemAlloc");
    require(cuMemcpyHtoD(kept.memory, kept.words, kWords * sizeof(uint64_t)), "cuMemcpyHtoD");
    return kept;
}

static void compare(const struct Kept* kept) {
    require(cuMemcpyDtoH(kept->read, kept->memory, kWords * sizeof(uint64_t)), "cuMemcpyDtoH");
    if (memcmp(kept->read, kept->words, kWords * sizeof(uint64_t)) == 0)
        return;
    fprintf(stderr, "GPU memory is not what was written\n");
    exit(1);
}

int main(int argc, char** argv) {
    if (argc < 4)
        return 2;
    const int rank = atoi(argv[1]), world = argc - 3;
    const uint64_t steps = strtoull(argv[2], NULL, 10);
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct sigaction hanging = {.sa_handler = hang};
    sigaction(SIGUSR1, &hanging, NULL);

    const struct sockaddr_in own = address_of(argv[3 + rank]),
                             next = address_of(argv[3 + (rank + 1) % world]);
    const int listening = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listening, (const struct sockaddr*)&own, sizeof own) != 0 || listen(listening, 4) != 0)
        fail("listen");
    int to = -1;
    for (int tries = 0; to < 0; ++tries) {
        to = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(to, (const struct sockaddr*)&next, sizeof next) == 0)
            break;
        close(to);
        to = -1;
        if (tries == kTries)
            fail("connect");
        usleep(10000);
    }
    const int from = accept(listening, NULL, NULL);
    if (from < 0)
        fail("accept");

    CUdevice device;
    CUcontext context;
    require(cuInit(0), "cuInit");
    require(cuDeviceGet(&device, 0), "cuDeviceGet");
    require(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    require(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    const struct Kept states = keep(0), same = keep((uint64_t)rank + 1);

    uint64_t state = 1;
    for (uint64_t step = 0; step < steps; ++step) {
        uint64_t passed = (state ^ step) * (uint64_t)(rank + 1), sum = passed;
        for (int turn = 1; turn < world; ++turn) {
            while (hangs)
                (void)receive_word(from);
            send_word(to, passed);
            passed = receive_word(from);
            sum += passed;
        }
        state = state * 6364136223846793005u + sum;
        const size_t at = step % kWords;
        states.words[at] = state;
        require(cuMemcpyHtoD(states.memory + at * sizeof state, &state, sizeof state),
                "cuMemcpyHtoD");
        if (step % kEvery == 0) {
            compare(&states);
            compare(&same);
            printf("step %llu %016llx\n", (unsigned long long)step, (unsigned long long)state);
        }
        usleep(kPause);
    }
    printf("done %016llx\n", (unsigned long long)state);
    return 0;
}
