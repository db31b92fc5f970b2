#!/usr/bin/env bash
# Remakes the checked-in Python code of all contracts. Run from anywhere.
set -euo pipefail
cd "$(dirname "$0")"
"${PYTHON:-python3}" -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. warhorse/v1/*.proto
