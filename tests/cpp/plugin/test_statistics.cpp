// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "cuda_plugin/statistics.hpp"

#include <chrono>
#include <cstdlib>
#include <new>
#include <string>

using namespace gpustasis;

namespace {

bool memory_is_out = false;

} // namespace

void* operator new(std::size_t size) {
    void* memory = memory_is_out ? nullptr : std::malloc(size);
    if (memory == nullptr)
        throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

// It is taken in a destructor: whatever escaped would end criu in the middle of a dump.
void a_time_without_memory_for_it_is_lost_and_nothing_else() {
    const std::string name = "a name that is too long to need no memory of its own";
    Phases phases;
    memory_is_out = true;
    const int result = phases.time(name, [] { return 7; });
    memory_is_out = false;
    CHECK(result == 7);
    CHECK(phases.milliseconds().empty());
}

void the_same_name_adds_up() {
    Phases phases;
    phases.add("write", std::chrono::milliseconds(2));
    phases.add("drop", std::chrono::milliseconds(1));
    phases.add("write", std::chrono::milliseconds(3));
    CHECK(phases.milliseconds().size() == 2);
    CHECK(phases.milliseconds()[0] == (std::pair<std::string, double>{"write", 5.0}));
}

} // namespace

int main() {
    a_time_without_memory_for_it_is_lost_and_nothing_else();
    the_same_name_adds_up();
}
