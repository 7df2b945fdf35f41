#!/bin/sh
# Four workers add: demo_test.sh COXSWAIN SOURCE_DIR named|sealed
set -eu

name=demo.$$
"$1" run -n 4 --model "$2/models/sums" --attach "$3" "$name" >/dev/null &
trap 'kill $!' EXIT
"$1" status --wait 60 "$name" >/dev/null
for sum in 27+58=85 999+1=1000; do
    output=$("$1" generate --name "$name" "${sum%=*}=")
    [ "$output" = "$sum" ] || { echo "FAIL: $output, not $sum" >&2; exit 1; }
done
"$1" stop "$name"
wait $!
trap - EXIT
