// SPDX-License-Identifier: Apache-2.0
/// The files of a sealed file, beside it in the clear: written, or compared.
#pragma once

#include "seal/sealed_reader.hpp"

namespace gpustasis::seal {

/// Write every file into `dir`, an empty directory that nobody else writes to, with mode and time, and sync
/// each. Throws OutputError, also if a name is taken; Error: io, corrupt_data of what is read. Some files may be
/// there then.
void extract_sealed(const SealedReader& sealed, int dir, unsigned threads = 0,
                    const SealProgress& tell = {});

/// Check that `dir` holds every file with just these bytes. Throws Error: corrupt_data that names the first
/// that differs; io.
void compare_sealed(const SealedReader& sealed, int dir, unsigned threads = 0,
                    const SealProgress& tell = {});

} // namespace gpustasis::seal
