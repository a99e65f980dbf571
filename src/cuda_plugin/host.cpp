#include "cuda_plugin/host.hpp"

#include "core/error.hpp"

#include <dlfcn.h>

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
}

namespace cudackpt::host {
namespace {

void log(criu::LogLevel level, const char* mark, const std::string& text) noexcept {
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
        throw Error(Errc::unsupported, std::string("this criu does not export ") + missing
                                           + "; CRIU 4.1 or later is needed");
}

void error(const std::string& text) noexcept { log(criu::LogLevel::error, "Error: ", text); }
void warn(const std::string& text) noexcept { log(criu::LogLevel::warning, "Warn: ", text); }
void info(const std::string& text) noexcept { log(criu::LogLevel::info, "", text); }
void debug(const std::string& text) noexcept { log(criu::LogLevel::debug, "", text); }

int image_dir() { return criu_get_image_dir(); }

void use_interrupt_only_mode() { set_compel_interrupt_only_mode(); }

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

} // namespace cudackpt::host
