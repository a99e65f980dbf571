// SPDX-License-Identifier: Apache-2.0
/* A process and its child, with a TCP connection between them over loopback: the child sends 1, 2, 3, ...,
 * and the parent prints each number, one a line, or ends with status 1. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { kPort = 7000, kPauseMicroseconds = 20000 };

static void send_all(int sock) {
    for (uint64_t number = 1;; ++number) {
        ssize_t sent;
        while ((sent = send(sock, &number, sizeof number, MSG_NOSIGNAL)) < 0 && errno == EINTR) {
        }
        if (sent != sizeof number)
            _exit(1);
        usleep(kPauseMicroseconds);
    }
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(kPort)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int listening = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listening, (struct sockaddr*)&address, sizeof address) != 0 ||
        listen(listening, 1) != 0)
        return 1;
    if (fork() == 0) {
        const int sock = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(sock, (struct sockaddr*)&address, sizeof address) != 0)
            return 1;
        send_all(sock);
    }
    const int sock = accept(listening, NULL, NULL);
    uint64_t number = 0;
    for (;;) {
        const ssize_t got = recv(sock, &number, sizeof number, MSG_WAITALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got != sizeof number)
            return 1;
        printf("%llu\n", (unsigned long long)number);
        fflush(stdout);
    }
}
