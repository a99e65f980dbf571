// SPDX-License-Identifier: Apache-2.0
/// The text of administrative requests and answers.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gpustasis::emulator {

/// The words of a request.
inline std::vector<std::string_view> split(std::string_view text) {
    std::vector<std::string_view> words;
    while (true) {
        const std::size_t start = text.find_first_not_of(' ');
        if (start == text.npos) {
            return words;
        }
        text.remove_prefix(start);
        words.push_back(text.substr(0, text.find(' ')));
        text.remove_prefix(words.back().size());
    }
}

/// A JSON string.
inline std::string quoted(std::string_view text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += c >= 0 && c < ' ' ? '?' : c;
    }
    return out + '"';
}

} // namespace gpustasis::emulator
