// SPDX-License-Identifier: Apache-2.0
/// The mark that tells this library from a driver: whoever finds it says "emulator" in what it
/// prints. What it returns is the mark's version.
extern "C" __attribute__((visibility("default"))) int gpustasis_driver_emulator(void) {
    return 1;
}
