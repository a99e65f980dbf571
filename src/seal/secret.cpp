// SPDX-License-Identifier: Apache-2.0
#include "seal/secret.hpp"

#include "seal/errors.hpp"

#include <openssl/crypto.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace gpustasis::seal {

Secret::Secret(std::size_t size) : size_(size), owner_(::getpid()) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    mapped_ = (size + page - 1) / page * page;
    void* const place =
        ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED)
        throw KeyMemoryError(io_error("cannot map memory for a key", errno));
    data_ = static_cast<std::byte*>(place);
    const char* failed = nullptr;
    if (::mlock(place, mapped_) != 0)
        failed =
            "cannot lock memory for a key (RLIMIT_MEMLOCK; raise it, as with `ulimit -l 1024`)";
    else if (::madvise(place, mapped_, MADV_DONTDUMP) != 0)
        failed = "cannot keep a key out of core dumps";
    else if (::madvise(place, mapped_, MADV_DONTFORK) != 0)
        failed = "cannot keep a key from child processes";
    if (failed != nullptr) {
        const int error_number = errno;
        clear(); // no destructor runs
        throw KeyMemoryError(io_error(failed, error_number));
    }
}

Secret::Secret(Secret&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)), owner_(other.owner_) {}

Secret& Secret::operator=(Secret&& other) noexcept {
    if (this != &other) {
        clear();
        data_ = std::exchange(other.data_, nullptr);
        size_ = std::exchange(other.size_, 0);
        mapped_ = std::exchange(other.mapped_, 0);
        owner_ = other.owner_;
    }
    return *this;
}

Secret::~Secret() {
    clear();
}

void Secret::clear() noexcept {
    if (data_ == nullptr)
        return;
    if (::getpid() == owner_) {
        wipe({data_, mapped_});
        ::munmap(data_, mapped_);
    }
    data_ = nullptr;
}

void wipe(MutBytes bytes) noexcept {
    OPENSSL_cleanse(bytes.data(), bytes.size());
}

} // namespace gpustasis::seal
