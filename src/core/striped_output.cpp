#include "core/striped_output.hpp"

#include "core/error.hpp"
#include "core/image_format.hpp"
#include "core/stripe_file.hpp"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace gpustasis {
namespace {

constexpr unsigned kMostAutomatic = 8; // docs/performance.md
constexpr std::uint64_t kWorthStripes = 64U << 20;

} // namespace

unsigned stripe_count(unsigned wanted, int fd, unsigned threads, std::uint64_t plain_size) {
    if (wanted > kMaxStripes)
        throw Error(Errc::bad_argument, "stripes out of range: " + std::to_string(wanted));
    if (wanted != 0)
        return wanted;
    struct statfs status {};
    if (::fstatfs(fd, &status) != 0)
        throw io_error("fstatfs", errno);
    if (status.f_type != TMPFS_MAGIC || plain_size < kWorthStripes)
        return 1;
    return std::clamp(threads, 1U, kMostAutomatic);
}

StripedOutput::Output::Output(int file, IoMode mode, std::uint32_t alignment,
                              std::uint64_t header_size)
    : fd(file), chunks(file, mode, alignment),
      places(format::align_up(header_size, alignment), alignment) {}

StripedOutput::StripedOutput(PartFile& image, int dir_fd, const std::string& name, unsigned files,
                             IoMode mode, std::uint32_t alignment)
    : image_(image), dir_fd_(dir_fd), name_(name), alignment_(alignment) {
    outputs_.emplace_back(image.fd(), mode, alignment, format::kHeaderSize);
    for (unsigned number = 1; number < files; ++number) {
        stripes_.emplace_back(dir_fd, stripe_name(name, number));
        outputs_.emplace_back(stripes_.back().fd(), mode, alignment, kStripeHeaderSize);
    }
}

std::optional<std::uint64_t> StripedOutput::take(std::uint64_t chunk, std::uint64_t stored_size) {
    return outputs_[chunk % files()].places.take(chunk / files(), stored_size);
}

void StripedOutput::cancel() noexcept {
    for (Output& output : outputs_)
        output.places.cancel();
}

void StripedOutput::write(std::uint64_t chunk, std::uint64_t offset, MutBytes buffer,
                          std::size_t size) {
    outputs_[chunk % files()].chunks.write(offset, buffer, size);
}

std::vector<Source> StripedOutput::finish_stripes(const ImageInfo& info, Bytes index) {
    const auto entries = hash_stripe_entries(index, files());
    std::vector<Source> sources;
    for (unsigned number = 1; number < files(); ++number) {
        Output& output = outputs_[number];
        sources.push_back(write_stripe_frame(output.fd,
                                             {.checkpoint_id = info.checkpoint_id,
                                              .pid = info.pid,
                                              .number = number,
                                              .alignment = alignment_,
                                              .entries_hash = entries[number]},
                                             output.places.end()));
        output.chunks.finish(sources.back().file_size);
    }
    return sources;
}

void StripedOutput::commit() {
    for (PartFile& stripe : stripes_)
        stripe.sync();
    image_.sync();
    std::size_t named = 0;
    try {
        for (PartFile& stripe : stripes_) {
            stripe.commit();
            ++named;
        }
        remove_stripes(dir_fd_, name_, files());
        image_.commit();
    } catch (...) {
        for (std::size_t i = 0; i < named; ++i)
            ::unlinkat(dir_fd_, stripe_name(name_, static_cast<unsigned>(i + 1)).c_str(), 0);
        throw;
    }
}

std::uint64_t StripedOutput::total_size() const {
    std::uint64_t size = 0;
    for (const Output& output : outputs_)
        size += file_size(output.fd);
    return size;
}

} // namespace gpustasis
