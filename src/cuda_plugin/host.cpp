// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/host.hpp"

#include "core/error.hpp"

#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>

// Weak, so that loading the plugin into a criu without one of them is our error message and not a
// crash at the first call. Source: criu/include/{log,plugin,image}.h, compel's infect.h.
extern "C" {
__attribute__((weak)) void print_on_level(unsigned level, const char* format, ...);
__attribute__((weak)) int criu_get_image_dir(void);
__attribute__((weak)) int add_inventory_plugin(const char* name);
__attribute__((weak)) bool check_and_remove_inventory_plugin(const char* name, std::size_t size);
__attribute__((weak)) void set_compel_interrupt_only_mode(void);
__attribute__((weak)) int criu_plugin_get_options(int* argc, char*** argv); // since 4.3
// criu/include/bfd.h: buffered images.
__attribute__((weak)) int bfdopenw(void* file);
__attribute__((weak)) int bwrite(void* file, const void* bytes, int size);
__attribute__((weak)) void bclose(void* file);
__attribute__((weak)) int bfd_flush_images(void);
__attribute__((weak)) void network_unlock(void);
__attribute__((weak)) int unsuspend_lsm(void);
__attribute__((weak)) void delete_link_remaps(void);
}

namespace gpustasis::host {
namespace {

// As CRIU marks its own lines, "Error (criu/bfd.c:131): ": crun tells its caller only lines of the log
// in which "Error" and a blank stand.
void log(criu::LogLevel level, const char* mark, const std::string& text) noexcept {
    if (print_on_level != nullptr) // else this is no criu: a test of a part
        print_on_level(static_cast<unsigned>(level), "%scuda_plugin: %s\n", mark, text.c_str());
}

/// struct bfd begins with its descriptor; what is behind is criu's, and less than this in any version.
struct BufferedFile {
    alignas(16) int fd = -1;
    std::byte rest[252] = {};
};

} // namespace

void require_symbols() {
    const char* missing = nullptr;
    if (print_on_level == nullptr)
        missing = "print_on_level";
    else if (criu_get_image_dir == nullptr)
        missing = "criu_get_image_dir";
    else if (::add_inventory_plugin == nullptr)
        missing = "add_inventory_plugin";
    else if (check_and_remove_inventory_plugin == nullptr)
        missing = "check_and_remove_inventory_plugin";
    else if (set_compel_interrupt_only_mode == nullptr)
        missing = "set_compel_interrupt_only_mode";
    if (missing != nullptr)
        throw Error(Errc::unsupported, std::string("this criu does not export ") + missing +
                                           "; CRIU 4.1 or later is needed");
}

void error(const std::string& text) noexcept {
    log(criu::LogLevel::error, "Error (gpustasis): ", text);
}
void warn(const std::string& text) noexcept {
    log(criu::LogLevel::warning, "Warn (gpustasis): ", text);
}
void info(const std::string& text) noexcept {
    log(criu::LogLevel::info, "", text);
}
void debug(const std::string& text) noexcept {
    log(criu::LogLevel::debug, "", text);
}

UniqueFd open_image_dir() {
    UniqueFd copy(::fcntl(criu_get_image_dir(), F_DUPFD_CLOEXEC, 3));
    if (!copy)
        throw io_error("cannot use criu's image directory", errno);
    return copy;
}

int image_dir() noexcept {
    return criu_get_image_dir();
}

void set_image_dir(int directory) {
    const int place = criu_get_image_dir();
    if (place < 0)
        throw Error(Errc::io, "criu has no image directory");
    if (::dup3(directory, place, O_CLOEXEC) < 0)
        throw io_error("cannot give criu another image directory", errno);
}

void require_fail_dump() {
    if (bfdopenw == nullptr || bwrite == nullptr || bclose == nullptr ||
        bfd_flush_images == nullptr || network_unlock == nullptr || unsuspend_lsm == nullptr ||
        delete_link_remaps == nullptr)
        throw Error(Errc::unsupported, "this criu does not export how it writes images");
}

bool images_are_cut() noexcept {
    return bfd_flush_images() != 0;
}

// An image whose last bytes could not be written is what criu itself fails for at this point. This one is a
// directory, so no write of it ever succeeds.
bool fail_dump() noexcept {
    BufferedFile file;
    file.fd = ::fcntl(criu_get_image_dir(), F_DUPFD_CLOEXEC, 3);
    if (bfdopenw(&file) == 0) {
        bwrite(&file, "", 1);
        bclose(&file);
    }
    return images_are_cut();
}

// As cr_dump_finish() of criu's cr-dump.c, in that order. What a criu does not export it keeps for itself.
void undo_dump_of_criu() noexcept {
    if (unsuspend_lsm != nullptr)
        unsuspend_lsm();
    if (network_unlock != nullptr)
        network_unlock();
    if (delete_link_remaps != nullptr)
        delete_link_remaps();
}

void use_interrupt_only_mode() {
    set_compel_interrupt_only_mode();
}

void add_inventory_plugin(const std::string& name) {
    if (::add_inventory_plugin(name.c_str()) != 0)
        throw Error(Errc::io, "criu could not note plugin \"" + name + "\" in its inventory");
}

bool take_inventory_plugin(const std::string& name) {
    return check_and_remove_inventory_plugin(name.c_str(), name.size());
}

criu::FinalState final_state() {
    const auto* opts = static_cast<const int*>(::dlsym(RTLD_DEFAULT, "opts"));
    if (opts == nullptr)
        return criu::FinalState::alive;
    switch (*opts) {
    case static_cast<int>(criu::FinalState::dead): return criu::FinalState::dead;
    case static_cast<int>(criu::FinalState::stopped): return criu::FinalState::stopped;
    default: return criu::FinalState::alive;
    }
}

bool asks_whether_to_retry() noexcept {
    return criu_plugin_get_options != nullptr; // both came with plugin interface 0.3
}

std::vector<std::pair<std::string, std::string>> plugin_options() {
    std::vector<std::pair<std::string, std::string>> options;
    if (criu_plugin_get_options == nullptr)
        return options;
    int count = 0;
    char** words = nullptr; // criu's; words[0] is no option
    if (const int result = criu_plugin_get_options(&count, &words); result < 0)
        throw io_error("cannot read criu's --plugin-option", -result);
    // Every plugin is handed every option, as "--PLUGIN.NAME=VALUE" or in two words.
    const std::string ours = "--cuda_plugin.";
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (!word.starts_with(ours))
            continue;
        const std::size_t equals = word.find('=');
        const std::string name = word.substr(ours.size(), equals - ours.size());
        if (equals != std::string::npos)
            options.emplace_back(name, word.substr(equals + 1));
        else if (i + 1 < count && !std::string(words[i + 1]).starts_with("--"))
            options.emplace_back(name, words[++i]);
        else
            options.emplace_back(name, "");
    }
    return options;
}

} // namespace gpustasis::host
