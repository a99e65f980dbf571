// SPDX-License-Identifier: Apache-2.0
#include "core/encoding_totals.hpp"

#include <array>

namespace gpustasis {

void EncodingTotals::add(Encoding encoding, bool reference, std::uint64_t plain_size,
                         std::uint64_t stored_size) noexcept {
    const std::array<Count*, 3> counts{&zero, &lz4, &raw};
    Count& count = reference ? ref : *counts[static_cast<std::size_t>(encoding)];
    ++count.chunks;
    count.plain += plain_size;
    count.stored += reference ? 0 : stored_size;
}

EncodingTotals& EncodingTotals::operator+=(const EncodingTotals& other) noexcept {
    const auto sum = [](Count& to, const Count& from) {
        to.chunks += from.chunks;
        to.plain += from.plain;
        to.stored += from.stored;
    };
    sum(zero, other.zero);
    sum(lz4, other.lz4);
    sum(raw, other.raw);
    sum(ref, other.ref);
    return *this;
}

} // namespace gpustasis
