// SPDX-License-Identifier: Apache-2.0
/// Messages between the daemon ("the GPUs") and its clients: the driver library, the NVML library
/// and the command line. One SOCK_SEQPACKET packet each, host byte order; both ends are of one
/// machine, and kWireMagic changes with any layout here.
///
/// A connection is either short (info, plan, admin, links: one request, one reply, closed) or a client's:
/// attach_client makes the daemon fork a worker that owns the client's VRAM from then on.
#pragma once

#include "driver_emulator/driver_abi.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpustasis::emulator {

inline constexpr std::uint32_t kWireMagic = 0x65'6d'75'06;
inline constexpr unsigned kMaxGpus = 16;
inline constexpr unsigned kMaxClients = 1024;
inline constexpr int kFirstPciBus = 0xe0;
inline constexpr std::size_t kMaxParamBytes = 4096; // of one kernel launch, as on real GPUs
inline constexpr unsigned kMaxParams = 128;
inline constexpr std::size_t kMaxAdminText = 65536;
inline constexpr std::uint64_t kSegmentSize = std::uint64_t{2} << 20; // granularity of VRAM

enum class WireOp : std::uint32_t {
    info = 1,      ///< -> DaemonInfo
    plan,          ///< PlanRequest -> OperationPlan
    admin,         ///< WireHeader + text -> text (JSON)
    attach_client, ///< AttachClient -> WireReply + fd of the CompletionPage
    detach_client, ///< WireHeader -> WireReply: gives all VRAM back, then the worker is gone
    attach_device, ///< AttachDevice -> WireReply + fd of the client's VRAM on that GPU
    map_segment,   ///< SegmentRequest -> WireReply
    unmap_segment, ///< SegmentRequest -> WireReply
    memory_info,   ///< SegmentRequest -> WireReply: value = free bytes, value2 = total
    load_module,   ///< ModuleRequest + fd of the image -> WireReply
    unload_module, ///< ModuleRequest -> WireReply
    find_function, ///< FunctionRequest -> FunctionReply
    launch,        ///< LaunchRequest + parameter bytes, no reply: see CompletionPage
    processes,     ///< ProcessesRequest -> ProcessList
    links,         ///< WireHeader -> WireReply + fd of the LinkPage
};

struct WireHeader {
    std::uint32_t magic = kWireMagic;
    WireOp op{};
};

struct GpuInfo {
    char name[64];
    Uuid uuid;
    std::uint32_t minor; ///< number in the machine, and of its device file
    std::uint32_t reserved;
    std::uint64_t memory; ///< capacity in bytes
    std::uint64_t used;   ///< by all clients, in bytes
};

/// What a client may know about the machine.
struct DaemonInfo {
    std::uint32_t magic;
    std::int32_t api_version; ///< as of cuDriverGetVersion: 12080, 13000, ...
    char driver_version[32];  ///< "580.95.05"
    std::uint32_t gpu_count;
    std::uint32_t persistence; ///< restore is allowed to callers that never called cuInit
    std::uint32_t cloexec;     ///< descriptors in the target are close-on-exec
    std::uint32_t desync;      ///< callers take any reply for theirs, as the real driver is said to
    std::uint32_t init_ms;     ///< how long cuInit takes
    std::uint32_t nvml_processes; ///< 0: NVML lists them; 1: NOT_SUPPORTED; 2: without sizes
    std::uint32_t nvml_memory;    ///< 0: NVML says how much is free; 1: NOT_SUPPORTED
    std::uint32_t managed_memory; ///< programs hold managed memory
    std::uint32_t nccl;           ///< programs are members of an NCCL process group
    std::uint32_t cuda_ipc;       ///< programs share memory by CUDA IPC; ms that 595 hangs on that
    char device_path[64]; ///< device that stands in for /dev/nvidia*; "" = chosen by the client
    GpuInfo gpus[kMaxGpus];
};

/// What memory a Checkpoint moves GPU memory to.
enum class StagingKind : std::uint32_t {
    plain,  ///< private anonymous
    locked, ///< the same, and mlocked
    shared, ///< shared anonymous
    memfd,  ///< a file in memory, shared, its descriptor closed
};

/// The operations that faults and delays can be attached to.
enum class Operation : std::uint32_t {
    init,
    get_state,
    lock,
    checkpoint,
    restore,
    unlock,
    complete, ///< of a Checkpoint or Restore with custom storage
};
inline constexpr unsigned kOperationCount = 7;

enum class FaultAction : std::uint32_t {
    none,
    error,      ///< answer with the code, do nothing
    hang,       ///< never answer, until the process is killed
    die,        ///< the target exits (code 0) or is killed by the signal `code`, mid-way
    oom,        ///< CUDA_ERROR_OUT_OF_MEMORY mid-way
    failed,     ///< CU_PROCESS_STATE_FAILED from now on, answer with the code
    fail_after, ///< do all of it, then answer with the code
    hang_half,  ///< as hang, when half of the memory has been moved; elsewhere as hang
    state,      ///< do nothing, answer with success and `code` as the state
    lie,        ///< do nothing, answer with success
    twice,      ///< do all of it, then answer twice
    nonsense,   ///< do all of it, then answer with the first half of a reply
    wrong,      ///< do all of it, then answer with noise of the right length
    close,      ///< do all of it, then close the way back instead of answering
    race,       ///< in cuInit: wait until the process `code` is to be checkpointed
    end_thread, ///< the restore thread ends mid-way, the process does not
};

/// Asks who uses one GPU.
struct ProcessesRequest {
    WireHeader header;
    std::uint32_t gpu; ///< its minor number
    std::uint32_t reserved;
};

struct ProcessList {
    std::uint32_t magic;
    std::uint32_t count;
    struct {
        std::int32_t pid; ///< as the daemon sees it
        std::uint32_t reserved;
        std::uint64_t used;
    } entries[kMaxClients];
};

struct PlanRequest {
    WireHeader header;
    Operation operation;
};

/// What shall happen in one operation: times, and the fault if there is one.
struct OperationPlan {
    FaultAction action = FaultAction::none;
    std::int32_t code = 0;
    std::uint32_t delay_ms = 0;
    std::uint32_t lock_drain_ms = 0;
    std::uint32_t d2h_ms_per_gib = 0; ///< of each GPU, at least this long; 0 = as fast as memory
    std::uint32_t h2d_ms_per_gib = 0;
    std::uint32_t direct_d2h_ms_per_gib = 0; ///< of each GPU, for what a caller copies itself
    std::uint32_t direct_h2d_ms_per_gib = 0;
    std::uint32_t undefined = 0;    ///< Restore fills memory that a caller shall write
    std::uint32_t staging = 0;      ///< StagingKind
    std::uint32_t lingering_ms = 0; ///< how long a helper thread outlives a Checkpoint
    std::uint32_t leftovers = 0;    ///< helper threads leave a malloc arena and a stack behind
    std::uint32_t gaps = 0;         ///< a Checkpoint unmaps the GPUs' addresses, and stages there
};

struct AttachClient {
    WireHeader header;
    std::uint64_t completed; ///< launches already done, in an earlier life of the client
    char device[32];         ///< what stands in for device files in the client, for `status`
    char mapping[32];        ///< and for their mappings
};

struct AttachDevice {
    WireHeader header;
    std::uint32_t gpu;
    std::uint32_t reserved;
    std::uint64_t window_base; ///< the client's address for the first byte of its VRAM
    std::uint64_t window_size;
};

struct SegmentRequest {
    WireHeader header;
    std::uint32_t gpu;
    std::uint32_t reserved;
    std::uint64_t offset; ///< in the client's window; multiple of kSegmentSize
    std::uint64_t size;   ///< multiple of kSegmentSize
};

struct ModuleRequest {
    WireHeader header;
    std::uint64_t module; ///< chosen by the client
};

struct FunctionRequest {
    WireHeader header;
    std::uint64_t module;
    char name[256];
};

struct WireReply {
    std::uint32_t magic;
    Result result;
    std::uint64_t value;
    std::uint64_t value2;
};

struct FunctionReply {
    WireReply reply;
    std::uint32_t param_count;
    std::uint32_t param_bytes; ///< of the whole parameter buffer
    std::uint16_t sizes[kMaxParams];
    std::uint16_t offsets[kMaxParams];
};

struct LaunchRequest {
    WireHeader header;
    std::uint64_t sequence; ///< consecutive, from AttachClient::completed + 1
    std::uint64_t module;
    char name[256];
    std::uint32_t grid[3];
    std::uint32_t block[3];
    std::uint32_t param_bytes;
    std::uint32_t reserved;
};

/// Written by the worker, read by its client; a memfd both have mapped.
struct CompletionPage {
    static constexpr unsigned kTimes = 64 * 1024 - 2;
    std::atomic<std::uint64_t> completed;       ///< sequence of the last launch that is done
    std::atomic<std::uint32_t> ticks;           ///< futex, moves with `completed`
    std::atomic<std::int32_t> error;            ///< sticky CUresult of a launch that failed
    std::atomic<std::uint64_t> done_ns[kTimes]; ///< CLOCK_MONOTONIC, at [sequence % kTimes]
};

/// Until when the GPUs' links are taken, by CLOCK_MONOTONIC: a memfd that the daemon makes and whoever
/// copies has mapped. [GPU][0: to the host, 1: to the device]
struct LinkPage {
    std::atomic<std::uint64_t> busy_until_ns[kMaxGpus][2];
};

} // namespace gpustasis::emulator
