// SPDX-License-Identifier: Apache-2.0
// A checkpoint of a chain is what lies in the directory that is asked for, and opens under the key of its place.
#include "check.hpp"
#include "sealed_sample.hpp"

#include "core/error.hpp"
#include "core/image_input.hpp"
#include "seal/sealed_chain.hpp"

#include <memory>
#include <string>

using namespace gpustasis;
using namespace gpustasis::seal;
using sample::Buffer;
using sample::Directory;

namespace {

constexpr const char* kName = "core-1.img";

Buffer bytes_of(const ImageInput& input) {
    Buffer bytes(input.size());
    input.read(0, bytes.size(), bytes);
    return bytes;
}

struct Family {
    FreshKey parent;
    FreshKey child;
    Directory sealed; ///< the parent
    Family() {
        child.build_on(parent.key());
        sample::seal_into(sealed, parent);
    }
};

void the_parent_opens_by_the_key_of_the_child() {
    const Family family;
    SealedChain chain(family.child.key());
    for (int again = 0; again < 2; ++again)
        CHECK(bytes_of(*chain.open(1, family.sealed.fd(), kName)) == sample::files().at(kName));
    CHECK_THROWS(Errc::corrupt_data, chain.open(1, family.sealed.fd(), "another.img"));
    CHECK_THROWS(Errc::corrupt_data, chain.open(2, family.sealed.fd(), kName)); // no key
}

void another_directory_is_another_checkpoint() {
    const Family family;
    FreshKey strange;
    const Directory other;
    sample::seal_into(other, strange);
    const Directory empty;
    SealedChain chain(family.child.key());
    CHECK(chain.open(1, family.sealed.fd(), kName) != nullptr);
    CHECK_THROWS(Errc::corrupt_data, chain.open(1, other.fd(), kName));
    CHECK_THROWS(Errc::io, chain.open(1, empty.fd(), kName));
    CHECK_THROWS(Errc::corrupt_data, chain.open(0, family.sealed.fd(), kName)); // the child's own
}

void files_outlive_the_chain() {
    const Family family;
    auto chain = std::make_unique<SealedChain>(family.child.key());
    const auto found = chain->open(1, family.sealed.fd(), kName);
    chain.reset();
    CHECK(bytes_of(*found) == sample::files().at(kName));
}

} // namespace

int main() {
    the_parent_opens_by_the_key_of_the_child();
    another_directory_is_another_checkpoint();
    files_outlive_the_chain();
}
