// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

static const char kUsage[] =
    "usage: train --module FILE [options]\n"
    "Train a small network with Adam on the first GPU; the same arguments give the same bits.\n"
    "  --module FILE      kernels: PTX, or a module of the driver emulator\n"
    "  --steps N          training steps (default 60)\n"
    "  --seed N           of data and first weights (default 1)\n"
    "  --hidden N         width of the two hidden layers (default 768)\n"
    "  --batch N          samples a step (default 32)\n"
    "  --data-mib N       training data on the GPU, in MiB (default 64)\n"
    "  --pool-mib N       untouched zero memory on the GPU, in MiB (default 176)\n"
    "  --result FILE      write losses and hashes as JSON when done\n"
    "  --mark-step N      write --mark-file once step N is done, and train on\n"
    "  --mark-file FILE   see --mark-step\n"
    "  --report-every N   steps between two lines of progress (default 1)\n";

static long parse_number(const char* text, long least, long most, const char* name) {
    char* end = NULL;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < least || value > most) {
        fprintf(stderr, "train: --%s takes a number from %ld to %ld, not '%s'\n", name, least, most,
                text);
        exit(2);
    }
    return value;
}

struct options parse_options(int argc, char** argv) {
    enum {
        kModule,
        kSteps,
        kSeed,
        kHidden,
        kBatch,
        kData,
        kPool,
        kResult,
        kMarkStep,
        kMarkFile,
        kReport,
        kHelp
    };
    static const struct option kLong[] = {
        {"module", required_argument, NULL, kModule},
        {"steps", required_argument, NULL, kSteps},
        {"seed", required_argument, NULL, kSeed},
        {"hidden", required_argument, NULL, kHidden},
        {"batch", required_argument, NULL, kBatch},
        {"data-mib", required_argument, NULL, kData},
        {"pool-mib", required_argument, NULL, kPool},
        {"result", required_argument, NULL, kResult},
        {"mark-step", required_argument, NULL, kMarkStep},
        {"mark-file", required_argument, NULL, kMarkFile},
        {"report-every", required_argument, NULL, kReport},
        {"help", no_argument, NULL, kHelp},
        {NULL, 0, NULL, 0},
    };
    struct options o = {.seed = 1,
                        .steps = 60,
                        .report_every = 1,
                        .data_mib = 64,
                        .pool_mib = 176,
                        .hidden = 768,
                        .batch = 32};
    const long kMost = 1L << 30;
    int which = 0, place = 0;
    while ((which = getopt_long(argc, argv, "", kLong, &place)) != -1) {
        const char* name = which == '?' ? "" : kLong[place].name;
        switch (which) {
        case kModule: o.module = optarg; break;
        case kSteps: o.steps = parse_number(optarg, 1, kMost, name); break;
        case kSeed: o.seed = (uint64_t)parse_number(optarg, 0, kMost, name); break;
        case kHidden: o.hidden = (int)parse_number(optarg, 1, 16384, name); break;
        case kBatch: o.batch = (int)parse_number(optarg, 1, 4096, name); break;
        case kData: o.data_mib = parse_number(optarg, 1, 1L << 20, name); break;
        case kPool: o.pool_mib = parse_number(optarg, 0, 1L << 20, name); break;
        case kResult: o.result = optarg; break;
        case kMarkStep: o.mark_step = parse_number(optarg, 1, kMost, name); break;
        case kMarkFile: o.mark_file = optarg; break;
        case kReport: o.report_every = parse_number(optarg, 1, kMost, name); break;
        case kHelp: fputs(kUsage, stdout); exit(0);
        default: fputs(kUsage, stderr); exit(2);
        }
    }
    if (optind != argc || !o.module) {
        fputs(kUsage, stderr);
        exit(2);
    }
    if ((o.mark_step != 0) != (o.mark_file != NULL) || o.mark_step > o.steps) {
        fputs("train: --mark-step (at most --steps) and --mark-file go together\n", stderr);
        exit(2);
    }
    return o;
}
