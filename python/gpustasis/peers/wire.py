# SPDX-License-Identifier: Apache-2.0
"""What two nodes say to each other: TLS 1.3 with a certificate at both ends, requests and answers
of JSON, and the files of a checkpoint as the records of a stream. docs/format.md, "Between
nodes"."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpustasis.errors import PeerError, StreamError
from gpustasis.files import open_regular
from gpustasis.peers.config import Address, Config
from gpustasis.peers.room import MAX_FILES, Charge
from gpustasis.streaming.records import (
    STREAM_MAGIC,
    Contents,
    Decoder,
    Encoder,
    Entry,
    Header,
    Kind,
)

PROTOCOL_VERSION = 1
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE = 64 << 10  # bytes
_HANDSHAKE_S = 10.0
_ACCEPT_S = 5.0  # the same of who listens: nobody knows yet who it is
_LINGER_S = 5.0  # for the other end to read why it was refused
_WORKING_S = 0.2  # between words of who is at work: less than any limit of the configuration
_STEP = 1 << 16
_BEGIN, _END = (f"-----{word} CERTIFICATE-----" for word in ("BEGIN", "END"))

OnBytes = Callable[[int], object]


class RefusedError(PeerError):
    """The other end was reached, and does not do what it was asked for."""


def client_context(config: Config) -> ssl.SSLContext:
    """Raises PeerError if a certificate or the key cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which looks whether the name is right
    return _prepared(context, config)


def server_context(config: Config) -> ssl.SSLContext:
    """The same of who listens."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # what comes from a server is an answer, and nothing else
    return _prepared(context, config)


def _prepared(context: ssl.SSLContext, config: Config) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        with open_regular(config.key) as file:
            found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
            raise PeerError(f"the key {config.key} can be read by others: its mode must be 0600")
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise PeerError(
            f"the certificate {config.certificate} and the key {config.key} cannot be used: {exc}"
        ) from exc
    try:
        context.load_verify_locations(cafile=config.authority)
    except OSError as exc:
        raise PeerError(f"the authority {config.authority} cannot be used: {exc}") from exc
    return context


def _no_password() -> str:
    raise ValueError("it needs a password, and there is nobody to ask")


def name_of(certificate: Any) -> str:
    """Of a node: the first DNS name or address of its certificate, else its common name. Raises
    PeerError."""
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
    for part in certificate.get("subject", ()):
        names += [value for kind, value in part if kind == "commonName"]
    if not names or not names[0]:
        raise PeerError("a certificate names no node")
    if "*" in names[0]:  # whoever shares it could give up the copies of the others
        raise PeerError(f"a certificate names no one node, but {names[0]}")
    return str(names[0])


_KINDS = ("DNS", "IP Address")


class Connection:
    """One of them, at either end; closed with the block. place: for messages. heard: bytes of all
    messages. Each call raises
    PeerError if the other end is gone, or what it is about, a message or a record of at most a MiB,
    takes longer than the configuration says: who sends a byte now and then holds nobody up."""

    def __init__(self, sock: ssl.SSLSocket, place: str) -> None:
        self._sock = sock
        self.place = place
        self.heard = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sock.close()

    @property
    def other(self) -> str:
        """The name of the node at the other end."""
        return name_of(self._sock.getpeercert() or {})

    def is_of(self, certificate: bytes) -> bool:
        """Whether the other end has this certificate."""
        return self._sock.getpeercert(binary_form=True) == certificate

    def say(self, fields: dict[str, object]) -> None:
        """A request or an answer."""
        raw = json.dumps(fields).encode()
        if len(raw) > _MAX_MESSAGE:
            raise PeerError(f"{self.place}: a message of {len(raw)} bytes is too long")
        self.write(_LENGTH.pack(len(raw)) + raw)

    def hear(self) -> dict[str, Any]:
        """What the other end says. Raises PeerError with its words if that is why it refuses."""
        prefix = bytearray(_LENGTH.size)
        self.fill(memoryview(prefix))
        (size,) = _LENGTH.unpack(prefix)
        if size > _MAX_MESSAGE:
            raise PeerError(f"{self.place} says what is no message")
        self.heard += size
        raw = bytearray(size)
        self.fill(memoryview(raw))
        try:
            found = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as exc:
            raise PeerError(f"{self.place} says what is no message") from exc
        if not isinstance(found, dict):
            raise PeerError(f"{self.place} says what is no message")
        if "error" in found:
            raise RefusedError(f"{self.place} refuses: {found['error']}")
        return found

    def hear_end(self, on_word: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """What the other end says when it has done what takes it long. on_word: called each time
        that it says that it goes on; what it raises ends the wait."""
        while True:
            found = self.hear()
            if "working" not in found:
                return found
            on_word()

    def working(self) -> Callable[..., None]:
        """To be called while something takes long: has the other end know that it goes on."""
        last = time.monotonic()

        def tell(*_: object) -> None:
            nonlocal last
            if time.monotonic() - last >= _WORKING_S:
                last = time.monotonic()
                self.say({"working": True})

        return tell

    def fill(self, space: memoryview) -> None:
        """Read as much as fits."""
        filled = 0
        begin = time.monotonic()
        while filled < len(space):
            self._require_soon(begin)
            try:
                count = self._sock.recv_into(space[filled:])
            except (OSError, ValueError) as exc:
                raise self._gone(exc) from exc
            if count == 0:
                raise PeerError(f"{self.place} has closed the connection")
            filled += count

    def write(self, data: memoryview | bytes) -> None:
        """All of it."""
        left = memoryview(data)
        begin = time.monotonic()
        while left:
            self._require_soon(begin)
            try:
                left = left[self._sock.send(left) :]
            except (OSError, ValueError) as exc:
                raise self._gone(exc) from exc

    def _require_soon(self, begin: float) -> None:
        limit = self._sock.gettimeout()
        if limit is not None and time.monotonic() - begin > limit:
            raise PeerError(f"{self.place} stalls: it takes more than {limit:g} s for one record")

    def has_word(self) -> bool:
        """Whether the other end has said something that was not heard yet."""
        if self._sock.pending():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def refuse(self, why: str) -> None:
        """Say why, and give the other end the time to hear it: it may be sending."""
        with suppress(PeerError, OSError):
            self.say({"error": why})
            end = time.monotonic() + _LINGER_S
            self._sock.settimeout(_LINGER_S)
            while time.monotonic() < end and self._sock.recv(_STEP):
                pass

    def _gone(self, exc: Exception) -> PeerError:
        if isinstance(exc, TimeoutError):
            return PeerError(f"{self.place} stalls: nothing goes for {self._sock.gettimeout():g} s")
        return PeerError(f"{self.place}: the connection broke off: {exc}")


def connect(address: Address, config: Config, *, here: bool = False) -> Connection:
    """here: to the server of this node, else to one of another. Raises PeerError if nobody is
    there, or it is somebody else."""
    context, own = client_context(config), own_certificate(config)
    context.check_hostname = not here  # its certificate is compared with this node's own
    try:
        plain = socket.create_connection((address.host, address.port), timeout=_HANDSHAKE_S)
    except OSError as exc:
        raise PeerError(f"cannot reach the neighbour {address}: {exc}") from exc
    try:
        sock = context.wrap_socket(plain, server_hostname=address.host)
    except (OSError, ValueError) as exc:
        plain.close()
        raise PeerError(f"the neighbour {address} is not who it should be: {exc}") from exc
    sock.settimeout(config.timeout_s)
    connection = Connection(sock, f"the neighbour {address}")
    if connection.is_of(own) == here:
        return connection
    sock.close()
    if here:
        raise PeerError(f"{address} is not this node: its certificate is not {config.certificate}")
    raise PeerError(
        f"the neighbour {address} is this node itself: it has the certificate "
        f"{config.certificate}; a copy has to be on another node"
    )


def own_certificate(config: Config) -> bytes:
    """Of this node, as the other end sees it. Raises PeerError."""
    try:
        text = config.certificate.read_text(encoding="ascii", errors="replace")
        end = text.index(_END) + len(_END)
        return ssl.PEM_cert_to_DER_cert(text[text.index(_BEGIN) : end])
    except (OSError, ValueError) as exc:
        raise PeerError(f"the certificate {config.certificate} cannot be read: {exc}") from exc


def accept(plain: socket.socket, context: ssl.SSLContext, config: Config) -> Connection:
    """The other end of connect(). Raises PeerError."""
    try:
        plain.settimeout(_ACCEPT_S)
        sock = context.wrap_socket(plain, server_side=True)
        sock.settimeout(config.timeout_s)
    except (OSError, ValueError) as exc:
        plain.close()
        raise PeerError(f"somebody connected who is no node: {exc}") from exc
    return Connection(sock, "the other node")


@dataclass(frozen=True, slots=True)
class Source:
    """A file to send: where it is, and by which name it goes."""

    path: Path
    name: str


def send_files(
    connection: Connection, sources: Iterable[Source], *, rate: int = 0, on_bytes: OnBytes
) -> int:
    """Send these files; how many bytes they have. rate: bytes a second, 0: no limit. Raises
    PeerError, OSError of a file here."""
    encoder = Encoder(STREAM_MAGIC, Header(stream_id=secrets.token_bytes(16), left_running=True))
    begin = time.monotonic()
    count = total = 0
    try:
        connection.write(encoder.header)
        for source in sources:
            with open_regular(source.path, os.O_NOFOLLOW) as file:
                found = os.fstat(file.fileno())
                left = found.st_size
                entry = Entry(name=source.name, mode=found.st_mode & 0o777, size=left)
                connection.write(encoder.file(entry))
                while left:
                    most = min(left, max(_STEP, rate)) if rate else left  # not long at one record
                    size = os.readv(file.fileno(), [encoder.space[:most]])
                    if not size:
                        raise PeerError(f"{source.path} was cut short while it was sent")
                    connection.write(encoder.record(Kind.DATA, size))
                    left -= size
                    total += size
                    on_bytes(total)
                    if rate:
                        time.sleep(max(0.0, total / rate - (time.monotonic() - begin)))
                    if connection.has_word():  # it refuses, in the middle of it
                        connection.hear()
                        raise PeerError(f"{connection.place} answers before it was asked")
                count += 1
        connection.write(encoder.end(count, total))
        connection.write(encoder.record(Kind.LEFT_RUNNING))
    except StreamError as exc:
        raise PeerError(str(exc)) from exc
    except PeerError:
        if connection.has_word():
            connection.hear()  # why it closed the connection, if it has said so
        raise
    return total


def take_files(
    connection: Connection, part: Path, most: int, room: Charge, *, never: Collection[str] = ()
) -> int:
    """Put the files that come into `part`; how many bytes they have. room: told of each file and of
    what comes of it. never: names that none may have. Raises PeerError, also if they are more than
    `most`, or too many; OSError."""
    decoder = Decoder(connection.fill, STREAM_MAGIC, connection.place)
    contents = Contents(connection.place)
    try:
        header = decoder.header()
        if header.sealed or header.answered or not header.left_running:
            raise PeerError(f"{connection.place} sends a stream of another kind")
        while contents.outcome is None:
            record = decoder.record()
            if record.kind is Kind.FILE:
                entry = contents.file(record)
                if entry.name in never:
                    raise PeerError(f"{connection.place} sends {entry.name}, which is of one node")
                if contents.total > most:
                    raise PeerError(
                        f"{connection.place} sends more than the {most} bytes that it spoke of"
                    )
                if contents.files > MAX_FILES:
                    raise PeerError(f"{connection.place} sends more than {MAX_FILES} files")
                room.file(entry.size)
                _take_file(decoder, contents, part, entry, room)
            elif record.kind is Kind.END:
                contents.end(record)
            elif record.kind is Kind.DATA:
                contents.data(record)  # of no file: refused
            else:
                contents.other(record, header)
    except StreamError as exc:
        raise PeerError(str(exc)) from exc
    if contents.outcome is not Kind.LEFT_RUNNING:
        raise PeerError(f"{connection.place} gave up")
    return contents.total


def _take_file(
    decoder: Decoder, contents: Contents, part: Path, entry: Entry, room: Charge
) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(part / entry.name, flags, 0o600)
    try:
        while not contents.complete:
            record = decoder.record()
            if record.kind is not Kind.DATA:
                raise PeerError(f"{entry.name} ended before all of it was there")
            data = contents.data(record)
            size = len(data)
            while data:
                data = data[os.write(fd, data) :]
            room.came(size)
        os.fchmod(fd, entry.mode & 0o700)
    finally:
        os.close(fd)
