// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/module_image.hpp"

#include <algorithm>
#include <cstring>
#include <elf.h>

namespace gpustasis::emulator {
namespace {

constexpr Elf64_Half kMachineCuda = 190; // EM_CUDA: a cubin
constexpr unsigned char kFatbin[] = {0x50, 0xed, 0x55, 0xba};

bool starts_with(const void* image, const void* start, std::size_t size) {
    return std::memcmp(image, start, size) == 0;
}

/// How far a table of `count` entries reaches; 0 if it is beyond the limit.
std::size_t table_end(std::uint64_t offset, std::uint64_t count, std::size_t entry,
                      std::size_t limit) {
    return offset > limit || count * entry > limit - offset ? 0 : offset + count * entry;
}

} // namespace

Result measure_image(const void* image, std::size_t limit, std::size_t* size) {
    if (limit < sizeof(Elf64_Ehdr)) {
        return Result::invalid_image;
    }
    if (starts_with(image, kFatbin, sizeof kFatbin)) {
        return Result::no_binary_for_gpu;
    }
    if (starts_with(image, "//", 2) || starts_with(image, ".version", 8) ||
        starts_with(image, "\n", 1)) {
        return Result::invalid_ptx;
    }
    const auto* bytes = static_cast<const unsigned char*>(image);
    Elf64_Ehdr header;
    std::memcpy(&header, image, sizeof header);
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64) {
        return Result::invalid_image;
    }
    if (header.e_machine == kMachineCuda) {
        return Result::no_binary_for_gpu;
    }
    const std::size_t programs =
        table_end(header.e_phoff, header.e_phnum, sizeof(Elf64_Phdr), limit);
    const std::size_t sections =
        table_end(header.e_shoff, header.e_shnum, sizeof(Elf64_Shdr), limit);
    if (header.e_type != ET_DYN || programs == 0 || sections == 0) {
        return Result::invalid_image;
    }
    std::size_t end = std::max(programs, sections);
    for (unsigned i = 0; i < header.e_phnum; ++i) {
        Elf64_Phdr program;
        std::memcpy(&program, bytes + header.e_phoff + i * sizeof program, sizeof program);
        end = std::max(end, table_end(program.p_offset, 1, program.p_filesz, limit));
    }
    for (unsigned i = 0; i < header.e_shnum; ++i) {
        Elf64_Shdr section;
        std::memcpy(&section, bytes + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_type != SHT_NOBITS) {
            end = std::max(end, table_end(section.sh_offset, 1, section.sh_size, limit));
        }
    }
    *size = end;
    return Result::success;
}

} // namespace gpustasis::emulator
