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
}

namespace gpustasis::host {
namespace {

void log(criu::LogLevel level, const char* mark, const std::string& text) noexcept {
    if (print_on_level != nullptr) // else this is no criu: a test of a part
        print_on_level(static_cast<unsigned>(level), "%scuda_plugin: %s\n", mark, text.c_str());
}

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
    log(criu::LogLevel::error, "Error: ", text);
}
void warn(const std::string& text) noexcept {
    log(criu::LogLevel::warning, "Warn: ", text);
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
