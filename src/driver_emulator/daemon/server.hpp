// SPDX-License-Identifier: Apache-2.0
/// The daemon's main loop: answers questions, forks a worker for each client.
#pragma once

#include "driver_emulator/daemon/fault_table.hpp"
#include "driver_emulator/daemon/ledger.hpp"
#include "driver_emulator/daemon/machine.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace gpustasis::emulator {

class Server {
public:
    /// Binds and listens. Throws std::system_error.
    explicit Server(Machine machine);
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server();

    /// Serves until it is told to stop; removes the socket.
    void run();

private:
    void accept_one();
    /// @returns whether the connection is done with and to be closed
    bool serve(int socket);
    [[nodiscard]] ProcessList processes_of(unsigned gpu);
    [[nodiscard]] std::string device_directory() const;
    [[nodiscard]] std::vector<std::string> device_names() const;
    void make_device_files() const;
    void remove_device_files() const;
    void fork_worker(int socket, const struct AttachClient& hello);
    void reap_workers();
    [[nodiscard]] DaemonInfo current_info() const;
    [[nodiscard]] std::string administer(std::string_view text);
    [[nodiscard]] std::string status_json() const;

    Machine machine_;
    Ledger& ledger_;
    FaultTable faults_;
    int listener_ = -1;
    int signals_ = -1;
    int links_ = -1; ///< the file of the LinkPage
    bool stopping_ = false;
};

} // namespace gpustasis::emulator
