// SPDX-License-Identifier: Apache-2.0
#include "core/image_check.hpp"

#include "core/direct_io.hpp"
#include "core/error.hpp"
#include "core/workers.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>

namespace gpustasis {
namespace {

// Chunks of an image that have bytes of their own in its file, by where they lie.
std::vector<ChunkInfo> own_chunks(const ImageReader& image, std::vector<std::uint64_t>& numbers) {
    std::vector<ChunkInfo> chunks; // offsets ascend with numbers
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        if (chunk.source != 0 || chunk.encoding == Encoding::zero)
            continue;
        chunks.push_back(chunk);
        numbers.push_back(number);
    }
    return chunks;
}

bool is_same_content(const ChunkInfo& a, const ChunkInfo& b) noexcept {
    return a.offset == b.offset && a.stored_size == b.stored_size && a.encoding == b.encoding &&
           a.plain_size == b.plain_size && a.stored_hash == b.stored_hash && a.hash == b.hash;
}

} // namespace

std::vector<ChunkDamage> find_damage(const ImageReader& image, std::uint64_t begin,
                                     std::uint64_t end, const std::vector<std::uint16_t>& sources,
                                     unsigned threads) {
    if (begin > end || end > image.chunk_count())
        throw Error(Errc::bad_argument, "there are no such chunks");
    std::mutex mutex;
    std::vector<ChunkDamage> found;
    FirstFailure failure;
    std::atomic<std::uint64_t> next = begin;
    run_workers(worker_count(threads, end - begin), failure, [&] {
        AlignedBuffer plain(image.info().chunk_size);
        while (!failure.any()) {
            const std::uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
            if (number >= end)
                return;
            const ChunkInfo chunk = image.chunk(number);
            if (std::ranges::find(sources, chunk.source) == sources.end())
                continue;
            try {
                image.read_chunk(number, plain.bytes().first(chunk.plain_size));
            } catch (const Error& e) {
                if (e.code() == Errc::bad_argument)
                    throw;
                const std::lock_guard lock(mutex);
                found.push_back({number, e.what()});
            }
        }
    });
    std::ranges::sort(found, {}, &ChunkDamage::number);
    return found;
}

std::vector<ChunkDamage> find_damaged_references(const ImageReader& image, std::uint16_t source,
                                                 const ImageReader& owner,
                                                 const std::vector<std::uint64_t>& damaged) {
    std::vector<std::uint64_t> numbers;
    const std::vector<ChunkInfo> owned = own_chunks(owner, numbers);
    std::vector<ChunkDamage> found;
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        if (chunk.source != source)
            continue;
        const auto place = std::ranges::lower_bound(owned, chunk.offset, {}, &ChunkInfo::offset);
        const char* what = nullptr;
        if (place == owned.end() || !is_same_content(*place, chunk))
            what = "is not what the image that holds it says of it";
        else if (std::ranges::binary_search(
                     damaged, numbers[static_cast<std::size_t>(place - owned.begin())]))
            what = "is damaged in the image that holds it";
        if (what == nullptr)
            continue;
        char text[64];
        std::snprintf(text, sizeof text, "chunk %llu at 0x%llx ",
                      static_cast<unsigned long long>(number),
                      static_cast<unsigned long long>(chunk.address));
        found.push_back({number, text + std::string(what)});
    }
    return found;
}

} // namespace gpustasis
