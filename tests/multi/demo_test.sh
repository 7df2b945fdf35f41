#!/bin/sh
# Four workers add: demo_test.sh COXSWAIN SOURCE_DIR named|sealed
set -eu

for sum in 27+58=85 999+1=1000; do
    output=$("$1" generate --model "$2/models/sums" -n 4 --attach "$3" "${sum%=*}=")
    [ "$output" = "$sum" ] || { echo "FAIL: $output, not $sum" >&2; exit 1; }
done
