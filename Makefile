# SPDX-License-Identifier: Apache-2.0
# Everything a newcomer needs: `make demo` and `make test` install, build and run. Both can be run
# again at any time; what is done already is not done twice. The work is in ci/.

.PHONY: help setup build lint format test test-kubernetes packages demo bench soak clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    the main job: train, checkpoint, kill, restore, compare; build/demo.json'
	@echo 'make test    build and run every test and check'
	@echo 'make test-kubernetes  build a Kubernetes node, and run the tests that need one'
	@echo 'make packages  a Debian package, and what an image for nodes of a cluster is made of'
	@echo 'make build   build/venv with gpustasis in it, and the wheel in build/dist'
	@echo 'make setup   system packages, and the roots with CRIU and the container engines'
	@echo 'make lint    formatters, linters, types and the rules for the tree only'
	@echo 'make format  put C++ and Python files into their format'
	@echo 'make bench   beside stock CRIU, on this machine; build/bench.json, docs/performance.md'
	@echo 'make soak    the long fault campaigns; report in build/soak.json'
	@echo 'make clean   remove build/ (the cached roots stay)'

setup:
	@ci/setup
	@ci/test-root all

build:
	@ci/setup
	@ci/build

lint: build
	@ci/lint

format: build
	@ci/lint --fix

test: setup build
	@ci/test

test-kubernetes: setup build
	@ci/test-kubernetes

packages: build
	@ci/packages

demo: # of what tests need, only what the demo needs: one CRIU, no linters, no tests
	@ci/setup demo
	@ci/test-root sid
	@ci/build demo
	@ci/demo

bench: setup build
	@ci/bench --docs docs/performance.md --workloads inference,finetuning,qlora,random,zeros \
		--contenders 'ours,stock,stock+lz4,criu --compress' --pairs 4
	@ci/bench-podman --docs docs/performance.md

soak: setup build
	@ci/soak
	@ci/test --every-criu -m one_criu

clean:
	rm -rf build
