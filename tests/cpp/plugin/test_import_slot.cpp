// SPDX-License-Identifier: Apache-2.0
// This program is its own criu: its calls are those that a slot leads elsewhere.
#include "check.hpp"
#include "sample.hpp"

#include "core/lineage.hpp"
#include "cuda_plugin/cpu_memory_dump.hpp"
#include "cuda_plugin/exit_kill.hpp"
#include "cuda_plugin/hidden_pages.hpp"
#include "cuda_plugin/import_slot.hpp"

#include <elf.h>
#include <link.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using namespace gpustasis;

namespace {

constexpr pid_t kOther = 123456;

pid_t other_getpgrp() {
    return kOther;
}

pid_t third_getpgrp() {
    return kOther + 1;
}

/// `function` by name, as a slot takes it.
template <class Function>
void* address_of(Function* function) {
    return reinterpret_cast<void*>(function);
}

void calls_lead_elsewhere_and_then_back() {
    const pid_t group = ::getpgid(0);
    for (int i = 0; i < 3; ++i) {
        CHECK(::getpgrp() == group);
        {
            const ImportSlot slot("getpgrp", address_of(other_getpgrp));
            CHECK(::getpgrp() == kOther);
        }
        CHECK(::getpgrp() == group);
    }
}

// What has changed it meanwhile puts back what it found itself, later.
void what_somebody_else_has_set_stays() {
    const pid_t group = ::getpgid(0);
    std::optional<ImportSlot> first;
    first.emplace("getpgrp", address_of(other_getpgrp));
    std::optional<ImportSlot> second;
    second.emplace("getpgrp", address_of(third_getpgrp));
    first.reset();
    CHECK(::getpgrp() == kOther + 1);
    second.reset();
    CHECK(::getpgrp() == kOther);
    // As it was found: this test puts back what both have left.
    const ImportSlot last("getpgrp", ImportSlot::find_imported("getpgrp"));
    CHECK(::getpgrp() == group);
}

struct Dynamic {
    std::uintptr_t base = 0;
    const ElfW(Sym) * symbols = nullptr;
    const char* names = nullptr;
    std::vector<std::pair<const ElfW(Rela)*, std::size_t>> relocations;
};

/// Of this program, which the dynamic linker lists first.
Dynamic own_dynamic() {
    Dynamic own;
    const auto look = [](dl_phdr_info* info, std::size_t, void* result) {
        static_cast<Dynamic*>(result)->base = info->dlpi_addr;
        return 1;
    };
    ::dl_iterate_phdr(look, &own);
    std::array<const ElfW(Rela)*, 2> tables{};
    std::array<std::size_t, 2> sizes{};
    for (const ElfW(Dyn)* entry = _DYNAMIC; entry->d_tag != DT_NULL; ++entry) {
        const std::uintptr_t at =
            entry->d_un.d_ptr < own.base ? own.base + entry->d_un.d_ptr : entry->d_un.d_ptr;
        switch (entry->d_tag) {
        case DT_SYMTAB: own.symbols = reinterpret_cast<const ElfW(Sym)*>(at); break;
        case DT_STRTAB: own.names = reinterpret_cast<const char*>(at); break;
        case DT_JMPREL: tables[0] = reinterpret_cast<const ElfW(Rela)*>(at); break;
        case DT_RELA: tables[1] = reinterpret_cast<const ElfW(Rela)*>(at); break;
        case DT_PLTRELSZ: sizes[0] = entry->d_un.d_val; break;
        case DT_RELASZ: sizes[1] = entry->d_un.d_val; break;
        default: break;
        }
    }
    for (std::size_t i = 0; i < tables.size(); ++i)
        if (tables[i] != nullptr)
            own.relocations.emplace_back(tables[i], sizes[i] / sizeof(ElfW(Rela)));
    return own;
}

/// Where this program's calls of `name` lead, from each place of its own.
std::vector<void*> where_calls_lead(const char* name) {
    const Dynamic own = own_dynamic();
    std::vector<void*> found;
    for (const auto& [table, count] : own.relocations)
        for (std::size_t i = 0; i < count; ++i) {
            const auto symbol = ELF64_R_SYM(table[i].r_info);
            if (symbol != 0 && std::strcmp(own.names + own.symbols[symbol].st_name, name) == 0)
                found.push_back(*reinterpret_cast<void**>(own.base + table[i].r_offset));
        }
    return found;
}

/// `change()` has this program's calls of `name` lead elsewhere as long as what it returns lives.
template <class Change>
void lead_back_at_the_end(const char* name, const Change& change) {
    const std::vector<void*> before = where_calls_lead(name);
    CHECK(!before.empty());
    {
        const auto changed = change();
        CHECK(where_calls_lead(name) != before);
    }
    CHECK(where_calls_lead(name) == before);
}

void the_plugin_leaves_no_call_led_elsewhere() {
    // Each once before: until then a call may lead into the dynamic linker, which then sets the
    // place itself.
    ::ioctl(-1, 0);
    CHECK(::ptrace(PTRACE_PEEKDATA, 0, nullptr, nullptr) == -1);
    lead_back_at_the_end("ptrace", [] { return std::make_unique<ExitKill>([](pid_t) {}); });
    lead_back_at_the_end("ioctl", [] { return std::make_unique<HiddenPages>(); });

    const sample::TempDir dir;
    Lineage lineage(dir.fd());
    Statistics statistics;
    Config config;
    config.cpu_memory = CpuMemory::ours;
    DumpImages images(config, dir.fd(), lineage, statistics);
    std::optional<HiddenPages> pages;
    CpuMemoryDump dump(config, images, statistics, pages);
    CHECK(::lseek(dir.fd(), 0, SEEK_CUR) == 0); // criu does call it
    const std::vector<void*> before = where_calls_lead("lseek");
    dump.prepare();
    CHECK(where_calls_lead("lseek") != before && pages);
    dump.finish(true);
    CHECK(where_calls_lead("lseek") == before);
}

void a_function_that_is_not_imported_is_refused() {
    CHECK_THROWS(Errc::unsupported, ImportSlot("no_such_function", nullptr));
    CHECK_THROWS(Errc::unsupported, ImportSlot::find_imported("no_such_function"));
}

} // namespace

int main() {
    calls_lead_elsewhere_and_then_back();
    what_somebody_else_has_set_stays();
    a_function_that_is_not_imported_is_refused();
    if (const std::string why_not = why_no_page_scan(); !why_not.empty()) {
        std::fprintf(stderr, "cannot be run: %s\n", why_not.c_str());
        return 1;
    }
    the_plugin_leaves_no_call_led_elsewhere();
}
