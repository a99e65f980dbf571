// SPDX-License-Identifier: Apache-2.0
/* Calls one function of the checkpoint API and prints "CODE VALUE": its result, and the state or the
 * thread where it gives one (else 0).
 *
 *     checkpoint_call [--uid UID] tid PID
 *                                 state PID
 *                                 lock PID [TIMEOUT_MS]
 *                                 checkpoint PID
 *                                 restore PID [init] [OLD_UUID NEW_UUID]...
 *                                 unlock PID
 *                                 reserved PID CALL      (CALL with a reserved byte set)
 *                                 custom PID CALL        (CALL asking for custom storage, 13.4)
 *
 * --uid gives up root first. `init` calls cuInit first. UUIDs are 32 hexadecimal digits.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_PAIRS 16

static int print(CUresult result, int value) {
    printf("%d %d\n", (int)result, value);
    return 0;
}

static void parse_uuid(const char* text, CUuuid* uuid) {
    for (int i = 0; i < 16; ++i) {
        unsigned byte = 0;
        if (sscanf(text + 2 * i, "%2x", &byte) != 1)
            exit(2);
        uuid->bytes[i] = (char)byte;
    }
}

/* Bytes of the argument structures, by offset: the headers of different versions name them otherwise. */
static CUresult call_with(const char* name, int pid, size_t offset, unsigned char value) {
    unsigned char args[64] = {0};
    args[offset] = value;
    if (!strcmp(name, "lock"))
        return cuCheckpointProcessLock(pid, (CUcheckpointLockArgs*)(void*)args);
    if (!strcmp(name, "checkpoint"))
        return cuCheckpointProcessCheckpoint(pid, (CUcheckpointCheckpointArgs*)(void*)args);
    if (!strcmp(name, "restore"))
        return cuCheckpointProcessRestore(pid, (CUcheckpointRestoreArgs*)(void*)args);
    if (!strcmp(name, "unlock"))
        return cuCheckpointProcessUnlock(pid, (CUcheckpointUnlockArgs*)(void*)args);
    exit(2);
}

static CUresult restore(int pid, int count, char** words) {
    static struct {
        CUuuid old_uuid, new_uuid;
    } pairs[MAX_PAIRS];
    int pair_count = 0;
    for (int i = 0; i < count; ++i) {
        if (!strcmp(words[i], "init")) {
            const CUresult result = cuInit(0);
            if (result != CUDA_SUCCESS) {
                fprintf(stderr, "cuInit: %d\n", (int)result);
                exit(2);
            }
        } else if (i + 1 < count && pair_count < MAX_PAIRS) {
            parse_uuid(words[i], &pairs[pair_count].old_uuid);
            parse_uuid(words[++i], &pairs[pair_count++].new_uuid);
        }
    }
    if (pair_count == 0)
        return cuCheckpointProcessRestore(pid, NULL);
    unsigned char args[64] = {0}; /* as CUcheckpointRestoreArgs of 13.0 */
    const void* pointer = pairs;
    const unsigned number = (unsigned)pair_count;
    memcpy(args, &pointer, sizeof pointer);
    memcpy(args + sizeof pointer, &number, sizeof number);
    return cuCheckpointProcessRestore(pid, (CUcheckpointRestoreArgs*)(void*)args);
}

int main(int argc, char** argv) {
    if (argc > 2 && !strcmp(argv[1], "--uid")) {
        const uid_t uid = (uid_t)atoi(argv[2]);
        if (setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0)
            return 2;
        argc -= 2, argv += 2;
    }
    if (argc < 3)
        return 2;
    const char* call = argv[1];
    const int pid = atoi(argv[2]);
    if (!strcmp(call, "tid")) {
        int tid = 0;
        const CUresult result = cuCheckpointProcessGetRestoreThreadId(pid, &tid);
        return print(result, tid);
    }
    if (!strcmp(call, "state")) {
        CUprocessState state = 0;
        const CUresult result = cuCheckpointProcessGetState(pid, &state);
        return print(result, (int)state);
    }
    if (!strcmp(call, "lock")) {
        CUcheckpointLockArgs args = {0};
        args.timeoutMs = argc > 3 ? (unsigned)atoi(argv[3]) : 0;
        return print(cuCheckpointProcessLock(pid, argc > 3 ? &args : NULL), 0);
    }
    if (!strcmp(call, "checkpoint"))
        return print(cuCheckpointProcessCheckpoint(pid, NULL), 0);
    if (!strcmp(call, "restore"))
        return print(restore(pid, argc - 3, argv + 3), 0);
    if (!strcmp(call, "unlock"))
        return print(cuCheckpointProcessUnlock(pid, NULL), 0);
    if (!strcmp(call, "reserved") && argc > 3)
        return print(call_with(argv[3], pid, 63, 1), 0);
    if (!strcmp(call, "custom") && argc > 3)
        return print(call_with(argv[3], pid, !strcmp(argv[3], "restore") ? 16 : 0, 1), 0);
    return 2;
}
