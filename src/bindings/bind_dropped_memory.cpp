// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "core/error.hpp"
#include "device_memory/custom_storage.hpp"
#include "device_memory/device_copy.hpp"
#include "dropped_memory/drop_record.hpp"
#include "dropped_memory/dump_lock.hpp"
#include "dropped_memory/refill.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "seal/sealed_chain.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <dlfcn.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

const Tell kNobody;

/// The image that `task` needs, in the directory of `lineage`, all of it verified.
ImageReader open_verified(const DroppedTask& task, Lineage& lineage, const seal::DataKey* key,
                          unsigned threads) {
    const int dir = lineage.directory(0);
    if (key != nullptr)
        lineage.open_by(std::make_shared<seal::SealedChain>(*key));
    ImageReader reader =
        key == nullptr
            ? open_dropped(task, lineage)
            : open_dropped(task, lineage,
                           ImageReader::from_input(seal::find_sealed_image(dir, task.image, *key),
                                                   task.image));
    reader.verify(threads, progress_of(kNobody)); // before anything is changed
    return reader;
}

std::uint64_t size_of(const ImageReader& image) {
    std::uint64_t size = 0;
    for (const Region& region : image.info().regions)
        size += region.length;
    return size;
}

std::uint64_t refill(const std::filesystem::path& directory, pid_t pid, const std::string& image,
                     const py::bytes& checkpoint_id, const py::bytes& digest, unsigned threads,
                     const Tell& progress, const seal::DataKey* key) {
    const DroppedTask task{.pid = pid,
                           .start_time = identify_task(pid).start_time,
                           .checkpoint_id = to_id(checkpoint_id),
                           .digest = to_id(digest),
                           .image = image};
    const py::gil_scoped_release unlocked;
    Lineage lineage(open_dir(directory).get());
    const ImageReader reader = open_verified(task, lineage, key, threads);
    refill_dropped(pid, reader, threads, progress_of(progress));
    return size_of(reader);
}

/// Signals that ask this process to end are not heard: the process that it fills would be lost.
class NotDisturbed {
public:
    NotDisturbed() {
        struct sigaction ignore {};
        ignore.sa_handler = SIG_IGN;
        for (std::size_t i = 0; i < std::size(kSignals); ++i)
            ::sigaction(kSignals[i], &ignore, &before_[i]);
    }
    NotDisturbed(const NotDisturbed&) = delete;
    NotDisturbed& operator=(const NotDisturbed&) = delete;
    ~NotDisturbed() {
        for (std::size_t i = 0; i < std::size(kSignals); ++i)
            ::sigaction(kSignals[i], &before_[i], nullptr);
    }

private:
    static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction before_[std::size(kSignals)] = {};
};

constexpr int kFillTries = 5;
constexpr std::chrono::seconds kFillAgain{1};

/// The driver, which is in this process already, is handed the memory of the image.
std::uint64_t restore_handed_over(const std::filesystem::path& directory, pid_t pid,
                                  const std::string& image, const py::bytes& checkpoint_id,
                                  const py::bytes& digest, const std::string& library,
                                  unsigned threads, const Tell& progress,
                                  const seal::DataKey* key) {
    const DroppedTask task{.pid = pid,
                           .start_time = identify_task(pid).start_time,
                           .checkpoint_id = to_id(checkpoint_id),
                           .digest = to_id(digest),
                           .image = image};
    const py::gil_scoped_release unlocked;
    Lineage lineage(open_dir(directory).get());
    const ImageReader reader = open_verified(task, lineage, key, threads);
    void* const driver = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (driver == nullptr)
        throw Error(Errc::unsupported, "cannot load the CUDA driver: " + std::string(::dlerror()));
    CustomStorage storage(driver, library);
    CustomStorage::Operation operation;
    MovedAt moved_at = 0;
    const NotDisturbed not_disturbed;
    // A driver that refuses may have done it all the same: then the record is what tells.
    begin_filling(identify_task(pid));
    begin_restore(storage, pid, reader.info(), {}, operation);
    const auto devices = number_devices(reader.info().gpus, operation);
    // The driver waits, and has no way back: what fails once is tried again, from the beginning.
    for (int tries = 1;; ++tries) {
        try {
            fill_devices(storage, devices, reader, threads, moved_at, progress_alone(progress));
            break;
        } catch (const std::exception& e) {
            const auto* const known = dynamic_cast<const Error*>(&e);
            const bool passes = known == nullptr || known->code() != Errc::corrupt_data;
            if (!passes || tries == kFillTries)
                throw;
        }
        std::this_thread::sleep_for(kFillAgain);
    }
    note_filled(identify_task(pid));
    operation.complete();
    end_filling(identify_task(pid));
    return size_of(reader);
}

void bind_record(py::module_& m) {
    py::class_<DropRecord>(m, "DropRecord",
                           "A task whose memory a dump has taken out and not put back, or that a "
                           "dump\nhas had checkpointed and not restored.")
        .def_readonly("pid", &DropRecord::pid, "of the task, as the dump saw it")
        .def_readonly("was_locked", &DropRecord::was_locked, "when the dump began: it is left so")
        .def_readonly("handed_over", &DropRecord::handed_over,
                      "its GPU memory, by the driver to the dump: the image alone has it")
        .def_readonly("filled", &DropRecord::filled,
                      "of one that memory was being put back: every byte of it was there")
        .def_readonly("image", &DropRecord::image, "file name in the image directory")
        .def_readonly("device", &DropRecord::device, "st_dev of the image directory")
        .def_readonly("inode", &DropRecord::inode, "st_ino of the image directory")
        .def_property_readonly(
            "directory", [](const DropRecord& self) { return to_python(self.directory); },
            "path of the image directory, as the dump saw it")
        .def_property_readonly("checkpoint_id",
                               [](const DropRecord& self) { return to_python(self.checkpoint_id); })
        .def_property_readonly("digest",
                               [](const DropRecord& self) { return to_python(self.digest); });
    m.def(
        "find_drop_record", [](pid_t pid) { return DropRecords().find(identify_task(pid)); },
        py::arg("pid"),
        "The record of process `pid`; None: no dump has taken memory out of it. Raises OSError, "
        "also\n"
        "if there is no such process; CorruptDataError, ValueError if others could write it.");
    m.def(
        "remove_drop_record", [](pid_t pid) { DropRecords().remove(identify_task(pid)); },
        py::arg("pid"), "The memory of process `pid` is back. Raises OSError, ValueError.");
    m.def(
        "find_filling_record",
        [](pid_t pid) { return DropRecords({}, DropRecords::kFilling).find(identify_task(pid)); },
        py::arg("pid"),
        "The record that GPU memory was being put back into process `pid` by somebody who may have "
        "died; None: there\nis none. Raises as find_drop_record.");
    m.def(
        "find_checkpoint_record",
        [](pid_t pid) {
            return DropRecords({}, DropRecords::kCheckpointed).find(identify_task(pid));
        },
        py::arg("pid"),
        "The record that a dump has had the driver checkpoint process `pid`, and has not brought "
        "it back;\n"
        "None: there is none. Raises as find_drop_record.");
    m.def(
        "list_checkpoint_records",
        [] { return DropRecords({}, DropRecords::kCheckpointed).list(); },
        "Those of all processes that this one can see. Raises as find_drop_record.");
    m.def(
        "remove_checkpoint_record",
        [](pid_t pid) { DropRecords({}, DropRecords::kCheckpointed).remove(identify_task(pid)); },
        py::arg("pid"), "Process `pid` runs again. Raises OSError, ValueError.");
    m.def("is_userfaultfd_setting_left", &is_userfaultfd_setting_left,
          "Whether a dump was killed while it had set vm.unprivileged_userfaultfd to 1 for a "
          "moment.\n"
          "Raises OSError, ValueError if others could write the file that says so.");
    m.def(
        "list_drop_records", [] { return DropRecords().list(); },
        "Of every task that is alive. Raises as find_drop_record.");
}

/// Python's view of a DumpLock: one that can be let go before the object is.
class HeldLock {
public:
    HeldLock(pid_t pid, const std::string& who) : lock_(std::in_place, identify_task(pid), who) {}

    std::optional<std::string> why_not() const {
        if (!lock_)
            return std::nullopt;
        const std::optional<Error>& why = lock_->why_not();
        return why ? std::optional<std::string>(why->what()) : std::nullopt;
    }
    void close() noexcept { lock_.reset(); }

private:
    std::optional<DumpLock> lock_;
};

void bind_lock(py::module_& m) {
    py::class_<HeldLock>(m, "DumpLock", "Keeps dumps and recoveries of a process away.")
        .def(py::init<pid_t, std::string>(), py::arg("pid"), py::arg("who"),
             py::call_guard<py::gil_scoped_release>(), // it may wait for another to let it go
             "who: this process and what it does, to be named to others. Raises\n"
             "UnsupportedDataError if another holds it, naming that one; OSError, also if there "
             "is no such\nprocess; ValueError if others could write the file.")
        .def_property_readonly("why_not", &HeldLock::why_not,
                               "what kept it from being taken; None: it is held")
        .def("close", &HeldLock::close);
}

} // namespace

void bind_dropped_memory(py::module_& m) {
    bind_record(m);
    bind_lock(m);
    m.def("is_drop_over", &is_drop_over, py::arg("pid"), py::arg("restore_thread"),
          "Whether no page of process `pid` can be dropped any more: its restore thread, which a "
          "dump\n"
          "makes call madvise, waits in a call of its own again, or is gone.");
    m.def("give_signals_back", &give_signals_back, py::arg("pid"), py::arg("restore_thread"),
          py::call_guard<py::gil_scoped_release>(),
          "If a dump that was killed has left the restore thread of process `pid` all signals but\n"
          "SIGTRAP blocked, give that thread the mask that it had before; whether that was so. The "
          "thread\nmust be back in a call of its own. Raises OSError, also if it cannot be "
          "stopped; "
          "UnsupportedDataError\nif another process traces it; as find_drop_record.");
    m.def("refill_dropped", &refill, py::arg("directory"), py::arg("pid"), py::arg("image"),
          py::arg("checkpoint_id"), py::arg("digest"), py::arg("threads") = 0,
          py::arg("progress") = py::none(), py::arg("key") = py::none(),
          "Put the memory that a dump has taken out of process `pid` back from file `image` of\n"
          "`directory`, after checking the whole image and that it is what the process lacks; its\n"
          "bytes. Raises CorruptDataError if it is not, and has changed nothing then; OSError.\n"
          "progress(bytes done) as in ImageReader.verify. key: of a sealed image. Releases the "
          "GIL.");
    m.def(
        "restore_handed_over", &restore_handed_over, py::arg("directory"), py::arg("pid"),
        py::arg("image"), py::arg("checkpoint_id"), py::arg("digest"), py::arg("library"),
        py::arg("threads") = 0, py::arg("progress") = py::none(), py::arg("key") = py::none(),
        "Have the driver restore process `pid`, which is checkpointed, and give it the GPU memory "
        "that\nit had handed over to a dump: from file `image` of `directory`, which is checked "
        "first; its\nbytes. cuInit was called. library: of the driver. Raises as "
        "refill_dropped; OSError if the driver\nrefuses: the process may lack memory then, and "
        "stays suspended.");
}

} // namespace gpustasis::bindings
