// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/process_memory.hpp"

#include <sys/mman.h>

#include <cstring>

using namespace gpustasis;
using sample::Buffer;

namespace {

constexpr std::size_t kSize = 64 * 4096;

class Mapping {
public:
    explicit Mapping(std::size_t size = kSize)
        : at_(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
          size_(size) {
        CHECK(at_ != MAP_FAILED);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { ::munmap(at_, size_); }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(at_); }
    MutBytes bytes() const { return {static_cast<std::byte*>(at_), size_}; }
    void protect(std::size_t from, std::size_t size, int protection) const {
        CHECK(::mprotect(static_cast<std::byte*>(at_) + from, size, protection) == 0);
    }

private:
    void* at_;
    std::size_t size_;
};

void memory_is_read_and_written(int protection) {
    const Mapping mapping;
    const Buffer content = sample::random_bytes(kSize, 3);
    std::ranges::copy(content, mapping.bytes().begin());
    mapping.protect(0, kSize, protection);
    Child child;
    ProcessMemory memory(child.pid());

    Buffer read(kSize);
    memory.read(mapping.address(), read);
    CHECK(read == content);

    const Buffer other = sample::random_bytes(kSize, 4);
    memory.write(mapping.address(), other);
    memory.read(mapping.address(), read);
    CHECK(read == other);

    memory.write_zeros(mapping.address() + 100, 200000);
    memory.read(mapping.address(), read);
    Buffer expected = other;
    std::fill_n(expected.begin() + 100, 200000, std::byte{0});
    CHECK(read == expected);
}

// One transfer over pages of which some do not allow it.
void protection_may_change_on_the_way() {
    const Mapping mapping;
    const Buffer content = sample::random_bytes(kSize, 3);
    std::ranges::copy(content, mapping.bytes().begin());
    mapping.protect(8 * 4096, 4096, PROT_NONE);
    mapping.protect(20 * 4096, 4096, PROT_READ);
    Child child;
    ProcessMemory memory(child.pid());
    Buffer read(kSize);
    memory.read(mapping.address(), read);
    CHECK(read == content);
    const Buffer other = sample::random_bytes(kSize, 4);
    memory.write(mapping.address(), other);
    memory.read(mapping.address(), read);
    CHECK(read == other);
}

void a_hole_is_an_error_that_names_it() {
    Child child;
    ProcessMemory memory(child.pid());
    Buffer read(8192);
    CHECK_THROWS(Errc::io, memory.read(4096, read));
    CHECK_THROWS(Errc::io, memory.write(4096, read));
    CHECK_THROWS(Errc::io, memory.write_zeros(4096, 8192));
    try {
        memory.read(4096, read);
    } catch (const Error& e) {
        CHECK(std::strstr(e.what(), "0x1000") != nullptr);
        CHECK(std::strstr(e.what(), std::to_string(child.pid()).c_str()) != nullptr);
    }
}

void a_task_that_is_gone_is_an_error() {
    Child child;
    ProcessMemory memory(child.pid());
    child.end();
    Buffer read(4096);
    CHECK_THROWS(Errc::io, memory.read(4096, read));
    CHECK_THROWS(Errc::io, memory.write(4096, read));
}

void a_task_is_written_to_an_image_and_back() {
    const sample::TempDir dir;
    const Mapping mapping(600 * 4096);
    const Buffer noise = sample::random_bytes(200 * 4096, 9);
    std::ranges::copy(noise, mapping.bytes().subspan(100 * 4096).begin());
    std::ranges::fill(mapping.bytes().subspan(400 * 4096), std::byte{5});
    const Buffer content(mapping.bytes().begin(), mapping.bytes().end());
    Child child;
    ProcessMemory memory(child.pid());
    ImageInfo info = info_of(sample::Memory{}, 0);
    info.regions = {{.address = mapping.address(), .length = content.size(), .protection = 3}};
    write_image(dir.fd(), "gpustasis-1.img", info, memory, {});

    memory.write(mapping.address(), sample::random_bytes(content.size(), 10));
    ImageReader::open(dir.fd(), "gpustasis-1.img").restore(memory, 0, false);
    Buffer read(content.size());
    memory.read(mapping.address(), read);
    CHECK(read == content);
}

} // namespace

int main() {
    memory_is_read_and_written(PROT_READ | PROT_WRITE);
    memory_is_read_and_written(PROT_READ);
    memory_is_read_and_written(PROT_NONE);
    protection_may_change_on_the_way();
    a_hole_is_an_error_that_names_it();
    a_task_that_is_gone_is_an_error();
    a_task_is_written_to_an_image_and_back();
}
