// SPDX-License-Identifier: Apache-2.0
/* A driver in front of the emulator's, to which it is linked: one call of it (-DCALL=...) has no memory left, whatever
 * it is asked for. To be named by the plugin's key `driver`: the job has the emulator's own. */
int CALL(void) {
    return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
}
