// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind.hpp"
#include "bindings/buffers.hpp"
#include "bindings/convert.hpp"
#include "seal/signature.hpp"
#include "seal/signed_directory.hpp"
#include "seal/statement.hpp"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpustasis::bindings {
namespace {

Bytes bytes_of(const std::string& text) {
    return std::as_bytes(std::span(text));
}

seal::Trusted trusted_of(const std::vector<py::bytes>& pems) {
    seal::Trusted trusted;
    for (const std::string text : pems)
        trusted.add(bytes_of(text));
    return trusted;
}

py::bytes state(const std::filesystem::path& dir,
                const std::optional<std::filesystem::path>& parent, unsigned threads,
                const Tell& progress) {
    const seal::SignProgress tell = progress_of(progress);
    std::vector<std::byte> text;
    {
        const py::gil_scoped_release unlocked;
        std::optional<seal::Sha256> digest;
        if (parent)
            digest = seal::read_statement_digest(open_dir(*parent).get());
        text = seal::encode_statement(
            seal::make_statement(open_dir(dir).get(), digest, threads, tell));
    }
    return to_python(Bytes(text));
}

py::tuple sign(const py::bytes& statement, const std::filesystem::path& key,
               const std::optional<std::filesystem::path>& certificate) {
    const std::string text(statement);
    std::vector<std::byte> signature;
    seal::SignedBy by;
    {
        const py::gil_scoped_release unlocked;
        const seal::Signer signer =
            seal::Signer::from_files(key.string(), certificate ? certificate->string() : "");
        signature = signer.sign(bytes_of(text));
        by = signer.facts();
    }
    return py::make_tuple(to_python(Bytes(signature)), std::move(by));
}

seal::SignedBy verify(const py::bytes& statement, const py::bytes& signature,
                      const std::vector<py::bytes>& trusted) {
    const std::string text(statement);
    const std::string record(signature);
    return trusted_of(trusted).verify(bytes_of(text), bytes_of(record));
}

void write(const std::filesystem::path& dir, const py::bytes& statement,
           const py::bytes& signature) {
    const std::string text(statement);
    const std::string record(signature);
    const py::gil_scoped_release unlocked;
    seal::write_signed(open_dir(dir).get(), bytes_of(text), bytes_of(record));
}

seal::SignedStatement read(const std::filesystem::path& dir, const std::vector<py::bytes>& pems,
                           bool own) {
    const seal::Trusted trusted = trusted_of(pems);
    const py::gil_scoped_release unlocked;
    return seal::read_signed(open_dir(dir).get(), trusted,
                             own ? seal::Owners::own : seal::Owners::any);
}

void check(const seal::SignedStatement& self, const std::filesystem::path& dir, bool for_others,
           bool own, unsigned threads, const Tell& progress) {
    const seal::SignProgress tell = progress_of(progress);
    const py::gil_scoped_release unlocked;
    seal::check_files(open_dir(dir).get(), self.statement,
                      for_others ? seal::Stated::for_others : seal::Stated::all,
                      own ? seal::Owners::own : seal::Owners::any, threads, tell);
}

py::object parent_of(const seal::SignedStatement& self) {
    if (!self.statement.parent)
        return py::none();
    return to_python(Bytes(*self.statement.parent));
}

void bind_statements(py::module_& m) {
    py::class_<seal::SignedBy>(m, "SignedBy", "Who has signed.")
        .def_property_readonly("subject",
                               [](const seal::SignedBy& self) { return to_python(self.subject); })
        .def_property_readonly("key",
                               [](const seal::SignedBy& self) { return to_python(self.key); })
        .def_property_readonly(
            "date", [](const seal::SignedBy& self) { return to_python(self.date); },
            "By the signer's own clock; \"\": it does not say.")
        .def_property_readonly(
            "warning", [](const seal::SignedBy& self) { return to_python(self.warning); },
            "That the certificate has expired or is not valid yet; \"\": it is valid.");
    py::class_<seal::SignedStatement>(m, "SignedStatement",
                                      "Which files a checkpoint has, signed by one who is trusted.")
        .def_static("read", &read, py::arg("directory"), py::arg("trusted"), py::kw_only(),
                    py::arg("own") = false,
                    "trusted: a certificate in PEM each. own: nobody but root and this user may\n"
                    "write there. Raises CorruptDataError, also if it is not signed by one of\n"
                    "these; OSError, ValueError, UnsupportedDataError. Releases the GIL.")
        .def("check", &check, py::arg("directory"), py::kw_only(), py::arg("for_others") = false,
             py::arg("own") = false, py::arg("threads") = 0, py::arg("progress") = py::none(),
             "Check that the directory holds just these files with just these bytes;\n"
             "for_others: those that checkpoints built on it read. Raises CorruptDataError,\n"
             "OSError, ValueError. Releases the GIL.")
        .def_readonly("by", &seal::SignedStatement::by)
        .def_property_readonly("files",
                               [](const seal::SignedStatement& self) {
                                   std::vector<py::str> names;
                                   names.reserve(self.statement.files.size());
                                   for (const seal::StatedFile& file : self.statement.files)
                                       names.push_back(to_python(file.name));
                                   return names;
                               })
        .def_property_readonly(
            "digest",
            [](const seal::SignedStatement& self) { return to_python(Bytes(self.digest)); },
            "SHA-256 of its text.")
        .def_property_readonly("parent", &parent_of,
                               "That of the checkpoint that it is built on; None: of none.");
}

} // namespace

void bind_signature(py::module_& m) {
    m.attr("STATEMENT_NAME") = seal::kStatementName;
    m.attr("SIGNATURE_NAME") = seal::kSignatureName;
    m.attr("MAX_SIGNATURE_SIZE") = seal::kMaxSignatureSize;
    bind_statements(m);
    m.def("is_left_unsigned",
          [](const py::str& name) { return seal::is_left_unsigned(to_text(name)); });
    m.def("make_statement", &state, py::arg("directory"), py::arg("parent") = py::none(),
          py::arg("threads") = 0, py::arg("progress") = py::none(),
          "The text of docs/format.md of every file in `directory`, which is built on the signed\n"
          "checkpoint in `parent`. Raises ValueError for what cannot be signed, OSError,\n"
          "CorruptDataError. Releases the GIL.");
    m.def("sign_statement", &sign, py::arg("statement"), py::arg("key"),
          py::arg("certificate") = py::none(),
          "(CMS in DER, by whom): by the private key in a PEM file, the certificate in another; "
          "None:\n"
          "in the same. Raises OSError, CorruptDataError, ValueError. Releases the GIL.");
    m.def(
        "verify_statement", &verify, py::arg("statement"), py::arg("signature"), py::arg("trusted"),
        "Raises CorruptDataError unless one of `trusted`, a certificate in PEM each, has signed.");
    m.def(
        "check_signer",
        [](const py::bytes& pem) {
            return seal::Signer::check_certificate(bytes_of(std::string(pem)));
        },
        py::arg("certificate"),
        "Raises CorruptDataError if it is not just one certificate, ValueError if it may not "
        "sign.");
    m.def("write_signed", &write, py::arg("directory"), py::arg("statement"), py::arg("signature"),
          "Both get their names when they are complete. Raises OSError. Releases the GIL.");
}

} // namespace gpustasis::bindings
