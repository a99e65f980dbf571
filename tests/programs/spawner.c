// SPDX-License-Identifier: Apache-2.0
/* spawner: has some twenty children at any time, each of which lives for a few milliseconds; who ended
 * leaves no zombie. Says "step N ok" now and then. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { kPauseUs = 100, kLifeUs = 4000, kStep = 100 };

int main(void) {
    signal(SIGCHLD, SIG_IGN);
    for (unsigned long number = 0;; ++number) {
        const pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0) {
            srand((unsigned)getpid());
            usleep((useconds_t)(rand() % kLifeUs));
            _exit(0);
        }
        if (number % kStep == 0) {
            printf("%d step %lu ok\n", (int)getpid(), number / kStep);
            fflush(stdout);
        }
        usleep(kPauseUs);
    }
}
