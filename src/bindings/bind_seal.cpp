// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/buffers.hpp"
#include "bindings/convert.hpp"
#include "core/file.hpp"
#include "seal/envelope.hpp"
#include "seal/key_source.hpp"
#include "seal/private_key.hpp"
#include "seal/sealed_checkpoint.hpp"
#include "seal/sealed_drain.hpp"
#include "seal/sealed_writer.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

// Of one file that is read whole; CRIU's small images and ours stay far below.
constexpr std::uint64_t kMaxRead = 64U << 20;

Bytes bytes_of(const std::string& text) {
    return std::as_bytes(std::span(text));
}

std::vector<Bytes> all_bytes(const std::vector<std::string>& texts) {
    std::vector<Bytes> all;
    all.reserve(texts.size());
    for (const std::string& text : texts)
        all.push_back(bytes_of(text));
    return all;
}

py::bytes wrap_for(const seal::DataKey& key, const std::vector<py::bytes>& pems) {
    std::vector<std::string> texts(pems.begin(), pems.end());
    return to_python(Bytes(seal::wrap(key, all_bytes(texts))));
}

seal::DataKey unwrap_with(const py::bytes& envelope, const std::filesystem::path& key) {
    const std::string bytes(envelope);
    const py::gil_scoped_release unlocked;
    return seal::unwrap(bytes_of(bytes), seal::PrivateKey::from_file(key.string()));
}

seal::DataKey unwrap_from(const py::bytes& envelope, int fd) {
    const std::string bytes(envelope);
    const py::gil_scoped_release unlocked;
    return seal::read_record(bytes_of(bytes), fd);
}

/// For a process that is started with the other end of it.
void hand_on(const seal::DataKey& self, int fd) {
    const seal::Secret record = self.record();
    if (::write(fd, record.bytes().data(), record.size()) != static_cast<ssize_t>(record.size()))
        throw io_error("cannot hand the key on", errno);
}

py::tuple recipient_of(const py::bytes& pem) {
    const seal::Recipient found = seal::check_recipient(bytes_of(std::string(pem)));
    return py::make_tuple(to_python(found.subject), to_python(found.key), to_python(found.warning));
}

std::vector<std::string> to_texts(const std::vector<py::str>& names) {
    std::vector<std::string> texts;
    texts.reserve(names.size());
    for (const py::str& name : names)
        texts.push_back(to_text(name));
    return texts;
}

py::tuple write(seal::FreshKey& key, const std::filesystem::path& source,
                const std::vector<py::str>& names, const std::filesystem::path& target,
                std::uint32_t frame_size, unsigned threads, const Tell& progress) {
    std::vector<std::string> texts = to_texts(names);
    const seal::SealProgress tell = progress_of(progress);
    const py::gil_scoped_release unlocked;
    const seal::SealedSizes done =
        seal::write_sealed(key, open_dir(source).get(), std::move(texts), open_dir(target).get(),
                           {frame_size, threads}, tell);
    const py::gil_scoped_acquire locked;
    return py::make_tuple(done.files, done.plain_size, done.file_size);
}

py::tuple write_from_arena(seal::FreshKey& key, const std::filesystem::path& arena,
                           const std::filesystem::path& source, const std::vector<py::str>& names,
                           const std::filesystem::path& target, unsigned threads,
                           std::uint64_t rate, const Tell& progress) {
    std::vector<std::string> texts = to_texts(names);
    const seal::SealProgress tell = progress_of(progress);
    const py::gil_scoped_release unlocked;
    const seal::SealedSizes done =
        seal::seal_from_arena(key, open_dir(arena).get(), open_dir(source).get(), std::move(texts),
                              open_dir(target).get(), {.threads = threads, .rate = rate}, tell);
    const py::gil_scoped_acquire locked;
    return py::make_tuple(done.files, done.plain_size, done.file_size);
}

std::unique_ptr<seal::SealedCheckpoint> open_sealed(const std::filesystem::path& dir,
                                                    const seal::DataKey& key) {
    const py::gil_scoped_release unlocked;
    return std::make_unique<seal::SealedCheckpoint>(open_dir(dir).get(), key);
}

py::bytes read_whole(const seal::SealedCheckpoint& self, const py::str& name) {
    const std::string text = to_text(name);
    std::vector<std::byte> bytes;
    {
        const py::gil_scoped_release unlocked;
        bytes = self.read(text, kMaxRead);
    }
    return to_python(Bytes(bytes));
}

using Work = void (seal::SealedCheckpoint::*)(int, unsigned, const seal::SealProgress&) const;

template <Work work>
void with_directory(const seal::SealedCheckpoint& self, const std::filesystem::path& dir,
                    unsigned threads, const Tell& progress) {
    const seal::SealProgress tell = progress_of(progress);
    const py::gil_scoped_release unlocked;
    (self.*work)(open_dir(dir).get(), threads, tell);
}

void check(const seal::SealedCheckpoint& self, const std::vector<py::str>& elsewhere,
           unsigned threads, const Tell& progress) {
    std::set<std::string> names;
    for (const py::str& name : elsewhere)
        names.insert(to_text(name));
    const seal::SealProgress tell = progress_of(progress);
    const py::gil_scoped_release unlocked;
    self.check(names, threads, tell);
}

void bind_keys(py::module_& m) {
    py::class_<seal::DataKey>(m, "DataKey",
                              "The key of a sealed checkpoint, in locked memory; it only opens.")
        .def_static("unwrap", &unwrap_with, py::arg("envelope"), py::arg("key"),
                    "key: the path of a private key in PEM, of which nobody else may read.\n"
                    "Raises OSError, CorruptDataError if the envelope is damaged or for another\n"
                    "key, ValueError for a key that opens no envelopes. Releases the GIL.")
        .def_static("read_record", &unwrap_from, py::arg("envelope"), py::arg("fd"),
                    "The key record that another program has taken out of `envelope`, read from\n"
                    "`fd` to its end, or to where it would have to wait. Raises OSError, "
                    "CorruptDataError. Releases the GIL.")
        .def("hand_on", &hand_on, py::arg("fd"),
             "Write the key record to a pipe that is empty. Raises OSError.")
        .def("wrap", &wrap_for, py::arg("certificates"),
             "An envelope for these, each PEM with one certificate. Raises ValueError,\n"
             "CorruptDataError.")
        .def(
            "check",
            [](const seal::DataKey& self, const py::bytes& envelope) {
                const std::string bytes(envelope);
                seal::check_envelope(self, bytes_of(bytes));
            },
            py::arg("envelope"),
            "Raises CorruptDataError unless `envelope` is whole and was made with this key.")
        .def_property_readonly("ancestor_count", &seal::DataKey::ancestor_count,
                               "How many earlier checkpoints this one is built on, whose keys it "
                               "holds.")
        .def_property_readonly(
            "sealed_id", [](const seal::DataKey& self) { return to_python(self.sealed_id()); });
    py::class_<seal::FreshKey>(m, "FreshKey", "A new random data key, to seal one checkpoint.")
        .def(py::init<>(), "Raises KeyMemoryError if memory for it cannot be locked.")
        .def_property_readonly(
            "key", [](const seal::FreshKey& self) -> const seal::DataKey& { return self.key(); },
            py::return_value_policy::reference_internal);
    m.def("check_recipient", &recipient_of, py::arg("certificate"),
          "(subject, key, warning or \"\") of the one certificate in PEM. Raises\n"
          "CorruptDataError if there is not just one, ValueError if it is not fit.");
    m.def(
        "cms_part",
        [](const py::bytes& envelope) {
            const std::string bytes(envelope);
            return to_python(seal::cms_part(bytes_of(bytes)));
        },
        py::arg("envelope"),
        "What of an envelope file other programs read: CMS, DER. Raises CorruptDataError,\n"
        "UnsupportedDataError for algorithms that the format does not have.");
    m.def(
        "ancestors_of",
        [](const py::bytes& envelope) {
            const std::string bytes(envelope);
            return seal::ancestors_of(bytes_of(bytes));
        },
        py::arg("envelope"),
        "How many checkpoints the one of this envelope is built on, as the size of what is\n"
        "encrypted in it tells; without a key it is not known to be true. Raises\n"
        "CorruptDataError, UnsupportedDataError as cms_part.");
    m.def("openssl_version", &seal::openssl_version,
          "Of the libcrypto that is linked in: \"OpenSSL 3.0.19 27 Jan 2026\".");
}

void bind_sealed(py::module_& m) {
    m.attr("SEALED_NAME") = seal::kSealedName;
    m.def(
        "is_sealed_name",
        [](const py::str& name) {
            const std::string text = to_text(name);
            return text == seal::kEnvelopeName || seal::sealed_file_id(text) != 0;
        },
        py::arg("name"), "Whether a file of that name is a sealed file, or the envelope.");
    m.attr("ENVELOPE_NAME") = seal::kEnvelopeName;
    m.attr("MAX_KEY_RECORD_SIZE") = seal::DataKey::kMaxRecordSize;
    m.attr("MAX_ENVELOPE_SIZE") = seal::kMaxEnvelopeSize;
    m.attr("DEFAULT_SEALED_FRAME") = seal::kDefaultSealedFrame;
    m.def("write_sealed", &write, py::arg("key"), py::arg("source"), py::arg("names"),
          py::arg("target"), py::kw_only(), py::arg("frame_size") = seal::kDefaultSealedFrame,
          py::arg("threads") = 0, py::arg("progress") = py::none(),
          "Seal the files `names` of the directory `source` into SEALED_NAME of `target`.\n"
          "Complete and durable on return: (files, bytes of these, bytes written). A key\n"
          "seals once. Raises ValueError, CorruptDataError if a file changes meanwhile, OSError\n"
          "if one cannot be read, OutputError. Releases the GIL.");
    m.def(
        "seal_from_arena", &write_from_arena, py::arg("key"), py::arg("arena"), py::arg("source"),
        py::arg("names"), py::arg("target"), py::kw_only(), py::arg("threads") = 0,
        py::arg("rate") = 0, py::arg("progress") = py::none(),
        "As write_sealed, of a checkpoint whose images lie in `arena`: each is compressed into a\n"
        "sealed file of its own, and nothing of it is on a disk in the clear. rate: bytes of\n"
        "images that are written in a second, at most; 0: no limit. Raises ValueError also if it\n"
        "is built on another, CorruptDataError also if an image is damaged. Releases the GIL.");
    py::class_<seal::SealedEntry>(m, "SealedEntry", "One file of a sealed checkpoint.")
        .def_property_readonly("name",
                               [](const seal::SealedEntry& self) { return to_python(self.name); })
        .def_readonly("mode", &seal::SealedEntry::mode)
        .def_readonly("size", &seal::SealedEntry::size)
        .def_readonly("mtime_ns", &seal::SealedEntry::mtime_ns, "since 1970");
    py::class_<seal::SealedCheckpoint>(
        m, "SealedReader",
        "The sealed files of a checkpoint: all are there, and header, end and index of each are\n"
        "found authentic.")
        .def_static("open", &open_sealed, py::arg("directory"), py::arg("key"),
                    "Raises OSError, CorruptDataError, UnsupportedDataError. Releases the GIL.")
        .def_property_readonly("entries", &seal::SealedCheckpoint::entries)
        .def_property_readonly("file_size", &seal::SealedCheckpoint::file_size)
        .def("__contains__", &seal::SealedCheckpoint::has)
        .def("read", &read_whole, py::arg("name"),
             "A small file, up to 64 MiB. Raises ValueError, CorruptDataError. Releases the GIL.")
        .def("extract", &with_directory<&seal::SealedCheckpoint::extract>, py::arg("directory"),
             py::arg("threads") = 0, py::arg("progress") = py::none(),
             "Write all files into an empty directory, each synced. Raises OutputError; OSError\n"
             "and CorruptDataError of what is read: some may be there then. Releases the GIL.")
        .def("compare", &with_directory<&seal::SealedCheckpoint::compare>, py::arg("directory"),
             py::arg("threads") = 0, py::arg("progress") = py::none(),
             "Check that the directory holds all files with just these bytes. Raises OSError,\n"
             "CorruptDataError. Releases the GIL.")
        .def("check", &check, py::arg("elsewhere"), py::arg("threads") = 0,
             py::arg("progress") = py::none(),
             "Check that every frame is authentic, but of sealed files that hold nothing beside\n"
             "files of these names. Raises OSError, CorruptDataError. Releases the GIL.");
}

} // namespace

void bind_seal(py::module_& m) {
    bind_keys(m);
    bind_sealed(m);
}

} // namespace gpustasis::bindings
