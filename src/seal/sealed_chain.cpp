// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_chain.hpp"

#include "core/error.hpp"

#include <sys/stat.h>

#include <cerrno>

namespace gpustasis::seal {

// At depth 0 the file that lists the others may be missing: a dump writes it last.
std::shared_ptr<const ImageInput> SealedChain::open(std::uint32_t depth, int directory,
                                                    const std::string& name) {
    if (depth == 0)
        return find_sealed_image(directory, name, key_);
    struct stat status {};
    if (::fstat(directory, &status) != 0)
        throw io_error("cannot examine a directory of the chain", errno);
    // Who searches for the checkpoint asks for it in several directories.
    const Place place{depth, status.st_dev, status.st_ino};
    auto found = opened_.find(place);
    if (found == opened_.end())
        found = opened_.try_emplace(place, directory, key_.at_depth(depth)).first;
    if (!found->second.has(name))
        throw Error(Errc::corrupt_data, "no sealed file holds " + name);
    return found->second.input(name);
}

} // namespace gpustasis::seal
