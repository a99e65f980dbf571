// SPDX-License-Identifier: Apache-2.0
#include "dropped_memory/missing_pages.hpp"

#include "core/error.hpp"
#include "core/memory_port.hpp"
#include "core/workers.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "tracee/injected_syscall.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

std::uint64_t page_size() noexcept {
    return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

Error failed(const char* what, int error) {
    if (error == ESRCH)
        return {Errc::gone, "the process whose memory is missing has ended"};
    return io_error(what, error);
}

/// Puts pages where none are. Notes which chunks it has come through with.
class MissingSink final : public MemorySink {
public:
    explicit MissingSink(int fd) noexcept : fd_(fd) {}

    void write(std::uint64_t address, Bytes bytes) override {
        const std::uint64_t chunk = address;
        while (!bytes.empty()) {
            uffdio_copy copy{};
            copy.dst = address;
            copy.src = reinterpret_cast<std::uint64_t>(bytes.data());
            copy.len = bytes.size();
            if (::ioctl(fd_, UFFDIO_COPY, &copy) == 0)
                break;
            const int error = errno;
            std::uint64_t done = copy.copy > 0 ? static_cast<std::uint64_t>(copy.copy) : 0;
            if (done == 0)
                done = pass_over(address, error, "UFFDIO_COPY");
            address += done;
            bytes = bytes.subspan(done);
        }
        const std::scoped_lock turn(mutex_);
        written_.push_back(chunk);
    }

    void write_zeros(std::uint64_t address, std::uint64_t length) override {
        while (length != 0) {
            uffdio_zeropage zero{};
            zero.range = {.start = address, .len = length};
            if (::ioctl(fd_, UFFDIO_ZEROPAGE, &zero) == 0)
                return;
            const int error = errno;
            std::uint64_t done = zero.zeropage > 0 ? static_cast<std::uint64_t>(zero.zeropage) : 0;
            if (done == 0)
                done = pass_over(address, error, "UFFDIO_ZEROPAGE");
            address += done;
            length -= done;
        }
    }

    /// Addresses of the chunks that write() has put in their place, ascending. When no thread is in it.
    std::vector<std::uint64_t> take_written() {
        std::ranges::sort(written_);
        return std::move(written_);
    }

private:
    /// What is there stays; whoever waits for it, because it came to be a moment ago, is woken. The
    /// bytes to go on behind.
    std::uint64_t pass_over(std::uint64_t address, int error, const char* what) const {
        if (error == EAGAIN) { // the process is changing its mappings
            ::sched_yield();
            return 0;
        }
        if (error != EEXIST)
            throw failed(what, error);
        uffdio_range range{.start = address, .len = page_size()};
        ::ioctl(fd_, UFFDIO_WAKE, &range);
        return range.len;
    }

    int fd_;
    std::mutex mutex_;
    std::vector<std::uint64_t> written_;
};

/// What fill() throws about chunks that it could not put back, `left` of them.
Error left_out(const ImageReader& image, const std::vector<std::uint64_t>& left,
               const Error& first) {
    constexpr std::size_t kNamed = 4;
    std::ostringstream text;
    text << left.size() << " of " << image.chunk_count()
         << " chunks of memory stay missing and guarded, all others are back: " << std::hex;
    for (std::size_t i = 0; i < std::min(kNamed, left.size()); ++i) {
        const ChunkInfo chunk = image.chunk(left[i]);
        text << "0x" << chunk.address << "-0x" << chunk.address + chunk.plain_size << ", ";
    }
    if (left.size() > kNamed)
        text << "..., ";
    text << "because " << first.what();
    return {first.code(), text.str()};
}

/// The chunk that `address` lies in. Throws Error: corrupt_data if there is none.
std::uint64_t chunk_at(const ImageReader& image, std::uint64_t address) {
    std::uint64_t low = 0;
    std::uint64_t high = image.chunk_count();
    while (low < high) { // the first chunk that ends behind `address`
        const std::uint64_t middle = low + (high - low) / 2;
        const ChunkInfo chunk = image.chunk(middle);
        if (chunk.address + chunk.plain_size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == image.chunk_count() || image.chunk(low).address > address)
        throw Error(Errc::corrupt_data, "the image has nothing for the page that is waited for");
    return low;
}

} // namespace

MissingPages::MissingPages(UniqueFd fd) : fd_(std::move(fd)) {
    uffdio_api api{};
    api.api = UFFD_API;
    if (::ioctl(fd_.get(), UFFDIO_API, &api) != 0)
        throw io_error("UFFDIO_API", errno);
}

void MissingPages::add(const Region& region) {
    uffdio_register range{};
    range.range = {.start = region.address, .len = region.length};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    if (::ioctl(fd_.get(), UFFDIO_REGISTER, &range) != 0)
        throw io_error("UFFDIO_REGISTER", errno);
    regions_.push_back(region);
}

void MissingPages::fill(const ImageReader& image, unsigned threads) {
    MissingSink sink(fd_.get());
    if (left_.empty()) {
        try {
            image.restore(sink, threads, true);
            return;
        } catch (const Error& e) {
            if (e.code() == Errc::gone)
                throw;
        }
        const std::vector<std::uint64_t> written = sink.take_written();
        for (std::uint64_t number = 0; number < image.chunk_count(); ++number)
            if (!std::ranges::binary_search(written, image.chunk(number).address))
                left_.push_back(number);
    }
    fill_left(image, threads);
}

void MissingPages::fill_left(const ImageReader& image, unsigned threads) {
    std::vector<std::uint64_t> still_left;
    std::optional<Error> first;
    std::mutex mutex;
    std::atomic<std::size_t> next = 0;
    FirstFailure failure;
    run_workers(worker_count(threads, left_.size()), failure, [&] {
        while (!failure.any()) {
            const std::size_t at = next++;
            if (at >= left_.size())
                return;
            try {
                put_chunk(image, left_[at]);
            } catch (const Error& e) {
                if (e.code() == Errc::gone)
                    throw;
                const std::scoped_lock turn(mutex);
                still_left.push_back(left_[at]);
                if (!first)
                    first = e;
            }
        }
    });
    std::ranges::sort(still_left);
    left_ = std::move(still_left);
    if (first)
        throw left_out(image, left_, *first);
}

void MissingPages::put_chunk(const ImageReader& image, std::uint64_t number) const {
    MissingSink sink(fd_.get());
    const ChunkInfo chunk = image.chunk(number);
    std::vector<std::byte> plain(chunk.plain_size);
    image.read_chunk(number, plain);
    if (chunk.encoding == Encoding::zero)
        sink.write_zeros(chunk.address, chunk.plain_size);
    else
        sink.write(chunk.address, plain);
}

void MissingPages::release() noexcept {
    for (const Region& region : regions_) {
        uffdio_range range{.start = region.address, .len = region.length};
        ::ioctl(fd_.get(), UFFDIO_UNREGISTER, &range); // else the end of the descriptor does it
    }
}

void MissingPages::answer(const ImageReader& image) {
    for (;;) {
        uffd_msg message{};
        const ssize_t got = ::read(fd_.get(), &message, sizeof(message));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            return;
        if (got != static_cast<ssize_t>(sizeof(message)))
            throw failed("read of a userfaultfd", got < 0 ? errno : EIO);
        if (message.event != UFFD_EVENT_PAGEFAULT)
            continue;
        const std::uint64_t number = chunk_at(image, message.arg.pagefault.address);
        try {
            put_chunk(image, number);
        } catch (const Error& e) {
            if (e.code() == Errc::gone)
                throw;
            // The kernel tells of a thread that waits only once.
            unanswered_.insert(number);
        }
    }
}

void MissingPages::answer_again(const ImageReader& image) {
    std::erase_if(unanswered_, [&](std::uint64_t number) {
        try {
            put_chunk(image, number);
            return true;
        } catch (const Error& e) {
            if (e.code() == Errc::gone)
                throw;
            return false;
        }
    });
}

UniqueFd make_userfaultfd(InjectedSyscalls& calls, pid_t pid, UserfaultfdRecord& record) {
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!pidfd)
        throw io_error("pidfd_open of process " + std::to_string(pid), errno);
    const auto take = [&] {
        record.begin(); // anew: what follows is allowed to take some seconds only
        return take_descriptor(calls, pidfd.get(), SYS_userfaultfd, kUserfaultfdFlags);
    };
    UniqueFd fd = take();
    if (!fd && errno == EPERM) {
        const UserfaultfdAllowed allowed;
        fd = take();
    }
    if (!fd)
        throw Error(Errc::unsupported, io_error("userfaultfd", errno).what());
    return fd;
}

} // namespace gpustasis
