// SPDX-License-Identifier: Apache-2.0
// What Go's archive/tar, which Podman, CRI-O and containerd read archives with, makes of each file
// that is named: one line of JSON for it.
package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
)

type member struct {
	// Names as hexadecimal digits: JSON has no bytes that are not UTF-8.
	Name   string `json:"name"`
	Target string `json:"target"`
	Type   string `json:"type"`
	Size   int64  `json:"size"`
	Digest string `json:"digest"`
}

type listing struct {
	Members []member `json:"members"`
	Error   string   `json:"error"`
}

func list(path string) (found listing) {
	file, err := os.Open(path)
	if err != nil {
		return listing{Error: err.Error()}
	}
	defer file.Close()
	reader := tar.NewReader(file)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			found.Error = err.Error()
			return found
		}
		hash := sha256.New()
		size, err := io.Copy(hash, reader)
		if err != nil {
			found.Error = err.Error()
			return found
		}
		found.Members = append(found.Members, member{
			Name:   hex.EncodeToString([]byte(header.Name)),
			Target: hex.EncodeToString([]byte(header.Linkname)),
			Type:   string(header.Typeflag),
			Size:   size,
			Digest: hex.EncodeToString(hash.Sum(nil)),
		})
	}
}

func main() {
	out := json.NewEncoder(os.Stdout)
	for _, path := range os.Args[1:] {
		if err := out.Encode(list(path)); err != nil {
			os.Exit(1)
		}
	}
}
