// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/import_slot.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace gpustasis {
namespace {

#if defined(__x86_64__)
constexpr std::uint64_t kJumpSlot = R_X86_64_JUMP_SLOT;
constexpr std::uint64_t kGlobalData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr std::uint64_t kJumpSlot = R_AARCH64_JUMP_SLOT;
constexpr std::uint64_t kGlobalData = R_AARCH64_GLOB_DAT;
#else
#error "relocations of this processor are not known"
#endif

/// What is needed of the main program's dynamic section (elf(5)).
struct MainProgram {
    std::uintptr_t base = 0;
    const ElfW(Sym) * symbols = nullptr;
    const char* names = nullptr;
    const ElfW(Rela) * calls = nullptr; ///< DT_JMPREL
    std::size_t calls_size = 0;         ///< bytes
    const ElfW(Rela) * data = nullptr;  ///< DT_RELA
    std::size_t data_size = 0;
    std::uintptr_t read_only_begin = 0; ///< written by the dynamic linker, then protected
    std::uintptr_t read_only_end = 0;
};

std::uintptr_t page_start(std::uintptr_t address) noexcept {
    return address & ~(static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE)) - 1);
}

void read_dynamic(const ElfW(Dyn) * entry, MainProgram& program) {
    // The dynamic linker may have made addresses of what are offsets in the file.
    const auto address = [&](const ElfW(Dyn) & one) {
        return one.d_un.d_ptr < program.base ? program.base + one.d_un.d_ptr : one.d_un.d_ptr;
    };
    for (; entry->d_tag != DT_NULL; ++entry) {
        switch (entry->d_tag) {
        case DT_SYMTAB:
            program.symbols = reinterpret_cast<const ElfW(Sym)*>(address(*entry));
            break;
        case DT_STRTAB: program.names = reinterpret_cast<const char*>(address(*entry)); break;
        case DT_JMPREL: program.calls = reinterpret_cast<const ElfW(Rela)*>(address(*entry)); break;
        case DT_PLTRELSZ: program.calls_size = entry->d_un.d_val; break;
        case DT_RELA: program.data = reinterpret_cast<const ElfW(Rela)*>(address(*entry)); break;
        case DT_RELASZ: program.data_size = entry->d_un.d_val; break;
        default: break;
        }
    }
}

int look_at_first(dl_phdr_info* info, std::size_t /*size*/, void* result) noexcept {
    MainProgram program;
    program.base = info->dlpi_addr;
    const ElfW(Dyn)* dynamic = nullptr;
    for (std::size_t i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& part = info->dlpi_phdr[i];
        if (part.p_type == PT_DYNAMIC)
            dynamic = reinterpret_cast<const ElfW(Dyn)*>(program.base + part.p_vaddr);
        if (part.p_type == PT_GNU_RELRO) {
            program.read_only_begin = page_start(program.base + part.p_vaddr);
            program.read_only_end = page_start(program.base + part.p_vaddr + part.p_memsz);
        }
    }
    if (dynamic != nullptr)
        read_dynamic(dynamic, program);
    *static_cast<MainProgram*>(result) = program;
    return 1; // the first is the main program: no other is looked at
}

} // namespace

ImportSlot::ImportSlot(std::initializer_list<const char*> names, void* function)
    : function_(function) {
    MainProgram program;
    ::dl_iterate_phdr(look_at_first, &program);
    const auto search = [&](const ElfW(Rela) * entries, std::size_t bytes) {
        if (entries == nullptr || program.symbols == nullptr || program.names == nullptr)
            return;
        for (std::size_t i = 0; i < bytes / sizeof(*entries); ++i) {
            const std::uint64_t type = ELF64_R_TYPE(entries[i].r_info);
            const auto symbol = ELF64_R_SYM(entries[i].r_info);
            if ((type != kJumpSlot && type != kGlobalData) ||
                std::ranges::find(
                    names, std::string_view(program.names + program.symbols[symbol].st_name)) ==
                    names.end())
                continue;
            const std::uintptr_t at = program.base + entries[i].r_offset;
            places_.push_back(
                {.at = reinterpret_cast<void**>(at),
                 .before = *reinterpret_cast<void**>(at),
                 .read_only = program.read_only_begin <= at && at < program.read_only_end});
        }
    };
    search(program.calls, program.calls_size);
    search(program.data, program.data_size);
    if (places_.empty())
        throw Error(Errc::unsupported, std::string("this criu does not import ") + *names.begin() +
                                           " in a way that can be changed (is it linked "
                                           "statically?)");
    try {
        for (const Place& place : places_)
            set(place, function_);
    } catch (const Error&) {
        put_back();
        throw;
    }
}

void* ImportSlot::find_imported(const char* name) {
    void* found = ::dlsym(RTLD_DEFAULT, name);
    if (found == nullptr)
        throw Error(Errc::unsupported, std::string("no library of this criu has ") + name);
    return found;
}

ImportSlot::~ImportSlot() {
    put_back();
}

void ImportSlot::put_back() noexcept {
    for (const Place& place : places_) {
        try {
            if (*place.at == function_) // else somebody else has changed it since
                set(place, place.before);
        } catch (const std::exception& e) {
            host::warn(e.what()); // the process is about to end, and calls go through us
        }
    }
}

void ImportSlot::set(const Place& place, void* value) {
    const std::uintptr_t page = page_start(reinterpret_cast<std::uintptr_t>(place.at));
    const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const auto protect = [&](int protection) {
        if (place.read_only && ::mprotect(reinterpret_cast<void*>(page), size, protection) != 0)
            throw io_error("cannot change where the main program calls a function", errno);
    };
    protect(PROT_READ | PROT_WRITE);
    std::atomic_ref<void*>(*place.at).store(value);
    protect(PROT_READ);
}

} // namespace gpustasis
