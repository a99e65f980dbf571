// SPDX-License-Identifier: Apache-2.0
#include "tracee/vector_state.hpp"

#include "tracee/ptrace.hpp"

#include <cpuid.h>
#include <elf.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace gpustasis {
namespace {

constexpr std::size_t kMaxSize = 64U << 10;   // AMX, the largest so far, needs 11 KiB
constexpr std::size_t kSoftwareBytes = 464;   // in the legacy area: not the processor's
constexpr std::size_t kLegacySize = 512;      // struct fxregs_state
constexpr std::size_t kHeaderSize = 64;       // struct xstate_header
constexpr unsigned kXsaveLeaf = 0xd;          // of CPUID
constexpr unsigned kFirstExtended = 2;        // x87 and SSE lie in the legacy area
constexpr unsigned kTileData = 18;            // AMX: only of processes that have asked for it
constexpr std::uint32_t kMagic1 = 0x46505853; // FP_XSTATE_MAGIC1
constexpr std::uint32_t kMagic2 = 0x46505845; // FP_XSTATE_MAGIC2

/// struct _fpx_sw_bytes
struct SoftwareBytes {
    std::uint32_t magic1 = kMagic1;
    std::uint32_t extended_size = 0;
    std::uint64_t features = 0;
    std::uint32_t state_size = 0;
    std::uint32_t padding[7] = {};
};
static_assert(sizeof(SoftwareBytes) == kLegacySize - kSoftwareBytes);

std::uint64_t number_at(const std::vector<std::byte>& bytes, std::size_t at) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    return value;
}

/// Where the state of the last of `features` ends: what the kernel saves for a thread with these.
std::size_t size_of(std::uint64_t features) {
    std::size_t end = kLegacySize + kHeaderSize;
    for (unsigned feature = kFirstExtended; feature < 63; ++feature) {
        if ((features >> feature & 1) == 0)
            continue;
        unsigned size = 0;
        unsigned offset = 0;
        unsigned flags = 0;
        unsigned unused = 0;
        if (__get_cpuid_count(kXsaveLeaf, feature, &size, &offset, &flags, &unused) != 0)
            end = std::max<std::size_t>(end, std::size_t{offset} + size);
    }
    return end;
}

} // namespace

std::vector<std::byte> read_vector_state(pid_t tid) {
    std::vector<std::byte> state(kMaxSize);
    iovec buffer{state.data(), state.size()};
    if (::ptrace(PTRACE_GETREGSET, tid, reinterpret_cast<void*>(std::uintptr_t{NT_X86_XSTATE}),
                 &buffer) != 0) {
        if (errno == ENODEV || errno == EINVAL)
            return {};
        throw io_error("PTRACE_GETREGSET of thread " + std::to_string(tid), errno);
    }
    // ptrace puts the features that the kernel has enabled where a signal frame has its magic.
    const std::uint64_t in_use = number_at(state, kLegacySize);
    std::uint64_t features = number_at(state, kSoftwareBytes);
    if ((in_use >> kTileData & 1) == 0)
        features &= ~(std::uint64_t{1} << kTileData);
    const std::size_t size = size_of(features);
    if (size > buffer.iov_len)
        throw Error(Errc::io, "thread " + std::to_string(tid) + " has vector registers of " +
                                  std::to_string(size) + " bytes, and ptrace gave " +
                                  std::to_string(buffer.iov_len));
    SoftwareBytes software;
    software.extended_size = static_cast<std::uint32_t>(size + sizeof(kMagic2));
    software.features = features;
    software.state_size = static_cast<std::uint32_t>(size);
    std::memcpy(state.data() + kSoftwareBytes, &software, sizeof(software));
    std::memcpy(state.data() + size, &kMagic2, sizeof(kMagic2));
    state.resize(size + sizeof(kMagic2));
    return state;
}

} // namespace gpustasis
