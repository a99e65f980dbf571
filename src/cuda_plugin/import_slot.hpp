// SPDX-License-Identifier: Apache-2.0
/// The place in this process's main program through which it calls a function of a library.
#pragma once

#include <initializer_list>
#include <vector>

namespace gpustasis {

/// Has the main program call another function in place of one that it imports, as long as this
/// lives. Calls by libraries, and by this plugin, go where they went before. Not while another thread
/// of the process runs code of the main program.
class ImportSlot {
public:
    /// `function` has the type of the function `name`. Throws Error: unsupported if the main program does
    /// not import that by a place that can be written to; io.
    ImportSlot(const char* name, void* function) : ImportSlot({name}, function) {}
    /// The same of a function that has several names, of which the main program may import any.
    ImportSlot(std::initializer_list<const char*> names, void* function);
    ImportSlot(const ImportSlot&) = delete;
    ImportSlot& operator=(const ImportSlot&) = delete;
    /// The main program calls again what it called before.
    ~ImportSlot();

    /// What a call leads to that this does not change: the function of the library. Throws Error: unsupported.
    static void* find_imported(const char* name);

private:
    struct Place {
        void** at = nullptr;
        void* before =
            nullptr; ///< may lead into the dynamic linker, which then sets the place itself
        bool read_only = false; ///< but for the moment of the change
    };
    void put_back() noexcept;
    static void set(const Place& place, void* value);

    void* function_;
    std::vector<Place> places_;
};

} // namespace gpustasis
