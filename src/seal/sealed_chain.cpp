// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_chain.hpp"

#include "core/error.hpp"

namespace gpustasis::seal {

// At depth 0 the file that lists the others may be missing: a dump writes it last.
std::shared_ptr<const ImageInput> SealedChain::open(std::uint32_t depth, int directory,
                                                    const std::string& name) {
    if (depth == 0)
        return find_sealed_image(directory, name, key_);
    auto found = opened_.find(depth);
    if (found == opened_.end())
        found = opened_.try_emplace(depth, directory, key_.at_depth(depth)).first;
    if (!found->second.has(name))
        throw Error(Errc::corrupt_data, "no sealed file holds " + name);
    return found->second.input(name);
}

} // namespace gpustasis::seal
