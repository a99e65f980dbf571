// SPDX-License-Identifier: Apache-2.0
/// What criu can be told that does not go together with packed images: pages that go elsewhere at a dump, or
/// come from elsewhere at a restore. It can be told so by its command line, a file of its own or a caller, and
/// a plugin is handed none of them: so what criu does counts, beside the words of the command line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gpustasis {

/// Whether `words`, each ended by a zero byte, ask for `option` ("--page-server"): as criu's getopt_long() takes
/// them, abbreviations too.
bool asks_for(std::string_view words, std::string_view option);

/// Before criu has written anything. `image_dir`: its own. `wanted`: what does not go together with them. Throws Error: unsupported, naming the option; io.
void refuse_pages_elsewhere(int image_dir, const std::string& wanted);

/// Whether criu has a connection to a page server: from its first question to a plugin until it has sent all pages.
bool sends_pages();

/// Pages that are in the images which criu's own link `parent` leads to.
enum class InParent { refused, there };

/// When it has written all of the files `names` of `directory`. Throws Error: unsupported if there are pages
/// that it has not put there; corrupt_data for a file that cannot be read as criu writes it; io.
void require_all_pages(int directory, const std::vector<std::string>& names,
                       InParent in_parent = InParent::refused);

/// Before anything is restored. `image_dir`: criu's own. Throws Error: unsupported, naming the option; io.
void refuse_pages_from_elsewhere(int image_dir, const std::string& wanted);

} // namespace gpustasis
