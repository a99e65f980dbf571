"""Two processes with a connection between them: the second checks its memory and sums up what the
first sends, and the first prints the sums. Words: rounds, MiB of memory, seconds for a round."""

import hashlib
import os
import signal
import socket
import sys
import time

rounds, mib, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def child(connection: socket.socket) -> None:
    memory = bytearray(os.urandom(1 << 20) * mib)
    digest = hashlib.sha256(memory).digest()
    total = 0
    while word := connection.recv(4, socket.MSG_WAITALL):
        total = (total * 31 + int.from_bytes(word, "big")) % (1 << 61)
        if total % 8 == 0 and hashlib.sha256(memory).digest() != digest:
            os._exit(9)
        time.sleep(seconds)
        connection.sendall(total.to_bytes(8, "big"))
    if hashlib.sha256(memory).digest() != digest:
        os._exit(9)


def told(number: int, frame: object) -> None:
    """Upon SIGTERM: the connection and the memory are as they were, or the status is not 40."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(64):  # an answer that is not read would reset the connection
        pass
    _, status = os.waitpid(second, 0)
    print("told to end", flush=True)
    os._exit(40 + os.waitstatus_to_exitcode(status))


listening = socket.create_server(("127.0.0.1", 0))
second = os.fork()
if second == 0:
    child(socket.create_connection(listening.getsockname()))
    os._exit(0)
connection, _ = listening.accept()
signal.signal(signal.SIGTERM, told)
for number in range(rounds):
    connection.sendall((number * 7919).to_bytes(4, "big"))
    answer = connection.recv(8, socket.MSG_WAITALL)
    # In one piece: print() makes four where PYTHONUNBUFFERED is set, and a dump may come between.
    os.write(1, f"{number} {int.from_bytes(answer, 'big')}\n".encode())
connection.close()
_, status = os.waitpid(second, 0)
sys.exit(os.waitstatus_to_exitcode(status))
