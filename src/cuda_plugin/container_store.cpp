// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/container_store.hpp"

#include "core/error.hpp"
#include "core/lineage.hpp"
#include "core/trusted_directory.hpp"
#include "seal/sealed_format.hpp"
#include "seal/statement.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

namespace gpustasis {
namespace {

constexpr const char* kNewest = "newest";
constexpr const char* kNewLink = ".newest.part";
constexpr const char* kLock = ".dump.lock";
constexpr std::string_view kHalfDone = ".gpustasis-new-";
constexpr const char* kInventory = "inventory.img"; // CRIU's: without it no checkpoint is complete
constexpr std::size_t kNameLength = 2 * sizeof(Id);

bool is_checkpoint_name(std::string_view name) {
    return name.size() == kNameLength &&
           name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

UniqueFd open_checkpoint(int store, const std::string& name) {
    return UniqueFd(::openat(store, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

void copy_file(int from_dir, int to_dir, const std::string& name) {
    const UniqueFd from(
        ::openat(from_dir, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat status {};
    if (!from || ::fstat(from.get(), &status) != 0)
        throw io_error("cannot read " + name, errno);
    const UniqueFd to(
        ::openat(to_dir, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (!to)
        throw io_error("cannot make " + name, errno);
    for (off_t left = status.st_size; left > 0;) {
        const ssize_t done =
            ::sendfile(to.get(), from.get(), nullptr, static_cast<std::size_t>(left));
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            throw io_error("cannot copy " + name, errno);
        if (done == 0)
            throw Error(Errc::io, "cannot copy " + name + ": it became shorter");
        left -= done;
    }
    // A manifest's time is that of its checkpoint: what is removed first goes by it.
    const std::array<timespec, 2> times = {status.st_atim, status.st_mtim};
    if (::futimens(to.get(), times.data()) != 0 || ::fsync(to.get()) != 0)
        throw io_error("cannot sync " + name, errno);
}

void link_or_copy(int from_dir, int to_dir, const std::string& name) {
    if (::linkat(from_dir, name.c_str(), to_dir, name.c_str(), 0) == 0)
        return;
    if (errno != EXDEV && errno != EPERM && errno != EMLINK && errno != EOPNOTSUPP)
        throw io_error("cannot link " + name, errno);
    copy_file(from_dir, to_dir, name);
}

bool is_ours(const std::string& name) {
    return name.starts_with("gpustasis-") &&
           (name.ends_with(".img") || name == seal::kEnvelopeName || name == seal::kStatementName ||
            name == seal::kSignatureName);
}

/// The inventory is always copied: CRIU writes into the file that is there when it dumps again.
void fill(int image_dir, int into) {
    const std::string images = "/proc/self/fd/" + std::to_string(image_dir);
    for (const auto& entry : std::filesystem::directory_iterator(images)) {
        const std::string name = entry.path().filename().string();
        if (is_ours(name) && entry.symlink_status().type() == std::filesystem::file_type::regular)
            link_or_copy(image_dir, into, name);
    }
    copy_file(image_dir, into, kInventory);
    const UniqueFd parent(::openat(image_dir, kParentLink, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (parent)
        link_parent(into, parent.get());
    else if (errno != ENOENT)
        throw io_error(std::string("cannot follow ") + kParentLink, errno);
}

void remove_half_done(const std::string& path) {
    for (const auto& entry : std::filesystem::directory_iterator(path))
        if (entry.path().filename().string().starts_with(kHalfDone))
            std::filesystem::remove_all(entry.path());
}

UniqueFd lock(int directory, const std::string& path) {
    UniqueFd file(
        ::openat(directory, kLock, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (!file)
        throw io_error("cannot open " + path + "/" + kLock, errno);
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK)
            throw Error(Errc::io, "another dump of this container is under way: it holds " + path +
                                      "/" + kLock);
        throw io_error("cannot lock " + path + "/" + kLock, errno);
    }
    return file;
}

/// std::filesystem's failures are ours from here on.
template <class Body>
void as_errors(Body&& body) {
    try {
        std::forward<Body>(body)();
    } catch (const std::system_error& e) {
        throw Error(Errc::io, e.what());
    }
}

} // namespace

ContainerStore::ContainerStore(const std::string& id, const std::string& base)
    : path_(base + "/gpustasis/containers/" + id),
      directory_(open_trusted(base, {"gpustasis", "containers", id}, IfMissing::make)),
      lock_(lock(directory_.get(), path_)) {
    as_errors([&] { remove_half_done(path_); });
}

UniqueFd ContainerStore::newest() const {
    char text[kNameLength + 2];
    const ssize_t length = ::readlinkat(directory_.get(), kNewest, text, sizeof text);
    if (length < 0 && errno == ENOENT)
        return {};
    const std::string what = path_ + "/" + kNewest;
    if (length < 0)
        throw io_error("cannot read the link " + what, errno);
    const std::string name(text, static_cast<std::size_t>(length));
    if (!is_checkpoint_name(name))
        throw Error(Errc::corrupt_data, what + " does not lead to a checkpoint beside it");
    UniqueFd directory = open_checkpoint(directory_.get(), name);
    if (!directory && errno != ENOENT)
        throw io_error("cannot open " + path_ + "/" + name, errno);
    return directory;
}

void ContainerStore::keep(int image_dir, const Id& id) const {
    const std::string name = id_text(id);
    const std::string part = std::string(kHalfDone) + name;
    try {
        as_errors([&] {
            if (::mkdirat(directory_.get(), part.c_str(), S_IRWXU) != 0)
                throw io_error("cannot make " + path_ + "/" + part, errno);
            const UniqueFd into = open_checkpoint(directory_.get(), part);
            if (!into)
                throw io_error("cannot open " + path_ + "/" + part, errno);
            fill(image_dir, into.get());
            ::unlinkat(directory_.get(), kNewLink, 0);
            if (::fsync(into.get()) != 0 ||
                ::renameat(directory_.get(), part.c_str(), directory_.get(), name.c_str()) != 0 ||
                ::symlinkat(name.c_str(), directory_.get(), kNewLink) != 0 ||
                ::renameat(directory_.get(), kNewLink, directory_.get(), kNewest) != 0 ||
                ::fsync(directory_.get()) != 0)
                throw io_error("cannot keep " + path_ + "/" + name, errno);
        });
    } catch (...) {
        std::error_code ignored;
        std::filesystem::remove_all(std::filesystem::path(path_) / part, ignored);
        throw;
    }
}

} // namespace gpustasis
