#!/bin/sh
# One check of the installed tree: headers, tiers, symbols, alone, pkg_config, find_package, engine or man. CTest runs install/tree first and sets
#   CC CMAKE    the compiler and the cmake of the build
#   PREFIX      the installed tree, LIBDIR its library folder, MODEL its model
#   SOURCE      the repository, for examples/
#   VERSION     what the packages must say, and SOVERSION the shared libraries
set -eu
export LC_ALL=C

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
include=$PREFIX/include
export PKG_CONFIG_PATH="$LIBDIR/pkgconfig"

fail() {
    echo "FAIL: $*" >&2
    exit 1
}

# What the user of a header may ask of a compiler.
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef -Werror"

# Every public header compiles on its own, as C and as C++.
headers() {
    cflags=$(pkg-config --cflags coxswain)
    count=0
    for header in $(cd "$include" && find coxswain -name '*.h' | sort); do
        count=$((count + 1))
        printf '#include <%s>\nextern int unit;\n' "$header" >"$scratch/header.c"
        "$CC" -std=c11 $warnings $cflags -fsyntax-only "$scratch/header.c" ||
            fail "$header as C"
        if command -v g++ >/dev/null; then
            g++ -x c++ -std=c++11 $warnings $cflags -fsyntax-only "$scratch/header.c" ||
                fail "$header as C++"
        fi
    done
    [ "$count" -ge 10 ] || fail "only $count headers are installed"
}

# The three headers together, in every language and with every compiler that is here: they compile without a warning, a
# program that packs no messages links libcoxswain and libcoxswain-memory alone, and one that packs them libcoxswain-proto too.
tiers() {
    cflags=$(pkg-config --cflags coxswain)
    compiled=0
    for compiler in "$CC:c11 c17 c2x" "gcc:c11 c17 c2x" "clang:c11 c17 c2x" "g++:c++17" "clang++:c++17"; do
        command -v "${compiler%%:*}" >/dev/null || continue
        for standard in ${compiler#*:}; do
            language=c
            case $standard in c++*) language=c++ ;; esac
            compiled=$((compiled + 1))
            for messages in 0 1; do
                package=coxswain-memory
                [ $messages = 0 ] || package="coxswain-memory coxswain-proto"
                "${compiler%%:*}" -x $language -std=$standard $warnings $cflags -DPACKS_MESSAGES=$messages \
                    -DEXPECTED_VERSION="\"$VERSION\"" "$SOURCE/tests/install/tiers.c" -x none \
                    $(pkg-config --libs $package) -o "$scratch/tiers" || fail "${compiler%%:*} -std=$standard"
                LD_LIBRARY_PATH=$LIBDIR "$scratch/tiers" || fail "tiers, $compiler -std=$standard"
            done
        done
    done
    echo "$compiled compilers and languages"
    [ $compiled -ge 3 ] || fail "only $compiled compilers and languages"
}

# The shared libraries export what the linker maps list, and nothing else.
symbols() {
    for name in coxswain coxswain-memory coxswain-proto; do
        library=$LIBDIR/lib$name.so
        soname=$(objdump -p "$library" | awk '$1 == "SONAME" { print $2 }')
        [ "$soname" = "lib$name.so.$SOVERSION" ] || fail "SONAME is $soname"
        # A library ends no process and prints nothing of its own: its users decide that. _exit is an orphan's (include/coxswain/worker.h),
        # abort an assertion's.
        if nm -D --undefined-only "$library" | sed 's/.* //; s/@.*//' |
            grep -xE 'exit|_Exit|quick_exit|at_quick_exit|v?printf|putchar|puts|__v?printf_chk'; then
            fail "$name ends the process, or prints"
        fi
    done
    "$PYTHON" "$SOURCE/tests/tree/symbols.py" check \
        "$LIBDIR/libcoxswain.so" "$LIBDIR/libcoxswain-memory.so" "$LIBDIR/libcoxswain-proto.so" ||
        fail "the exported functions are not those of include/*.map"
}

# Each command and each exported function has a page, and no page makes a formatter complain.
man() {
    pages=$PREFIX/share/man
    [ -d "$pages/man3" ] || { echo "SKIP: built without man pages"; exit 77; }
    for command in coxswain coxswain-worker $("$PREFIX/bin/coxswain" __complete '' | sed 's/^/coxswain-/; s/\t.*//'); do
        [ -e "$pages/man1/$command.1" ] || fail "no page of $command"
    done
    for function in $(sed -n 's/^ *\(cox_[a-z0-9_]*\);$/\1/p' "$SOURCE/include/libcoxswain.map" \
        "$SOURCE/include/libcoxswain-memory.map"); do
        [ -e "$pages/man3/$function.3" ] || echo "$function"
    done >"$scratch/missing"
    [ ! -s "$scratch/missing" ] || fail "no page of $(tr '\n' ' ' <"$scratch/missing")"
    count=0
    for page in "$pages"/man1/*.1 $(grep -L '^\.so ' "$pages"/man3/*.3); do
        count=$((count + 1))
        if command -v mandoc >/dev/null; then mandoc -T lint -W warning "$page"; fi
        if command -v groff >/dev/null; then groff -man -ww -T utf8 -K utf8 -z "$page"; fi
    done >"$scratch/complaints" 2>&1 || true
    [ ! -s "$scratch/complaints" ] || fail "$(cat "$scratch/complaints")"
    echo "$count pages"
    [ "$count" -ge 35 ] || fail "only $count pages"
}

examples_or_skip() {
    for example in worker execute take coordinator server queue domain; do
        if [ ! -e "$SOURCE/examples/$example.c" ]; then
            echo "SKIP: examples/$example.c does not exist"
            exit 77
        fi
    done
}

# run_examples coordinator worker: the one drives the other, and prints what is expected.
run_examples() {
    "$1" "$2" >"$scratch/output" || fail "$1 $2 ended with status $?"
    cat "$scratch/output"
    diff -u "$SOURCE/tests/install/expected_output.txt" "$scratch/output" || fail "output of $1"
}

run_queue() {
    "$1" >"$scratch/output" || fail "$1 ended with status $?"
    cat "$scratch/output"
    [ "$(grep -c '^message [1-3]: block [0-9]* says [149]$' "$scratch/output")" = 3 ] || fail "output of $1"
}

# Its own domain, which the library knows only through its functions.
run_domain() {
    "$1" >"$scratch/output" || fail "$1 ended with status $?"
    cat "$scratch/output"
    printf '%s\n' "copied: 'from host memory'" "shared: 'from host memory'" \
        "bytes went in 1 times, and out 2 times" | diff -u - "$scratch/output" || fail "output of $1"
}

pkg_config() {
    [ "$(pkg-config --modversion coxswain)" = "$VERSION" ] || fail "coxswain.pc has another version"
    examples_or_skip
    for name in memory proto; do
        [ "$(pkg-config --modversion coxswain-$name)" = "$VERSION" ] || fail "coxswain-$name.pc has another version"
    done
    for example in worker execute take coordinator server queue domain; do
        package=coxswain
        case $example in queue | domain) package=coxswain-memory ;; esac
        shared=$(pkg-config --cflags --libs $package)
        static=$(pkg-config --static --cflags --libs $package | sed -E 's/-lcoxswain(-memory|-proto)?/-l:libcoxswain\1.a/g')
        "$CC" -o "$scratch/$example" "$SOURCE/examples/$example.c" $shared
        "$CC" -o "$scratch/${example}_static" "$SOURCE/examples/$example.c" $static
    done
    if ldd "$scratch/worker_static" "$scratch/coordinator_static" "$scratch/queue_static" | grep libcoxswain; then
        fail "the static programs need libcoxswain.so"
    fi
    LD_LIBRARY_PATH=$LIBDIR run_examples "$scratch/coordinator" "$scratch/worker"
    LD_LIBRARY_PATH=$LIBDIR run_examples "$scratch/coordinator" "$scratch/take"
    run_examples "$scratch/coordinator_static" "$scratch/worker_static"
    run_examples "$scratch/coordinator_static" "$scratch/take_static"
    LD_LIBRARY_PATH=$LIBDIR run_queue "$scratch/queue"
    run_queue "$scratch/queue_static"
    LD_LIBRARY_PATH=$LIBDIR run_domain "$scratch/domain"
    run_domain "$scratch/domain_static"
}

find_package() {
    examples_or_skip
    "$CMAKE" -S "$SOURCE/tests/install/consumer" -B "$scratch/build" \
        -D CMAKE_C_COMPILER="$CC" -D CMAKE_PREFIX_PATH="$PREFIX" \
        -D COXSWAIN_VERSION="$VERSION" -D EXAMPLES="$SOURCE/examples"
    "$CMAKE" --build "$scratch/build"
    run_examples "$scratch/build/coordinator" "$scratch/build/worker"
    run_examples "$scratch/build/coordinator" "$scratch/build/take"
    run_examples "$scratch/build/coordinator_static" "$scratch/build/worker_static"
    run_queue "$scratch/build/queue"
    run_queue "$scratch/build/queue_static"
    run_domain "$scratch/build/domain"
    run_domain "$scratch/build/domain_static"
    "$scratch/build/tiers" || fail "tiers ended with status $?"
    "$scratch/build/tiers_static" || fail "tiers_static ended with status $?"
}

# The helpers and the rank group without a coordinator.
alone() {
    cflags=$(pkg-config --cflags coxswain)
    shared=$(pkg-config --libs coxswain)
    static=$(pkg-config --static --libs coxswain | sed -E 's/-lcoxswain(-proto)?/-l:libcoxswain\1.a/g')
    "$CC" -std=gnu11 -Wall -Wextra -Werror $cflags -o "$scratch/alone" "$SOURCE/tests/install/alone.c" $shared
    "$CC" -std=gnu11 -Wall -Wextra -Werror $cflags -o "$scratch/alone_static" "$SOURCE/tests/install/alone.c" $static
    LD_LIBRARY_PATH=$LIBDIR "$scratch/alone" || fail "alone ended with status $?"
    "$scratch/alone_static" || fail "alone_static ended with status $?"
}

# The reference engine as an engine of others: its sources, outside this tree, compile on the installed headers, link
# with the installed libraries, and the worker made so computes.
engine() {
    mkdir -p "$scratch/source/channel/base" "$scratch/objects"
    for folder in model compute rank batching; do
        mkdir -p "$scratch/source/engine/$folder"
        cp "$SOURCE/engine/$folder/"*.[ch] "$scratch/source/engine/$folder"
    done
    # HEADERS_ALONE of tests/tree/includes.py: they have no function behind them.
    for name in fault hash idioms thread; do
        cp "$SOURCE/channel/base/$name.h" "$scratch/source/channel/base"
    done
    cflags="-std=gnu11 -O2 -fPIC -D_GNU_SOURCE -ffp-contract=off -I$scratch/source -I$include/coxswain
        $(pkg-config --cflags coxswain-proto jansson)"
    find "$scratch/source/engine" -name '*.c' | sort |
        CFLAGS=$cflags OBJECTS=$scratch/objects xargs -P 2 -n 4 sh -c '
            for source in "$@"; do
                folder=$(basename "$(dirname "$source")")
                "$CC" $CFLAGS -c "$source" -o "$OBJECTS/$folder-$(basename "$source" .c).o" || exit 255
            done' sh || fail "the engine does not compile on the installed headers"
    libraries="$(pkg-config --libs coxswain coxswain-proto jansson) -lpthread -lm"
    cd "$scratch/objects"
    "$CC" -o ../worker rank-*.o compute-*.o model-*.o $libraries ||
        fail "the engine's worker does not link with the installed libraries"
    "$CC" -shared -Wl,--no-undefined -o ../batching.so batching-*.o model-*.o $libraries ||
        fail "the engine's batching does not link with the installed libraries"
    cd "$scratch"
    LD_LIBRARY_PATH=$LIBDIR "$PREFIX/bin/coxswain" generate --model "$MODEL" --worker "$scratch/worker" \
        --ranks 2 --quiet --max-tokens 4 "12+34=" >"$scratch/output" || fail "generate ended with status $?"
    cat "$scratch/output"
    grep -q 46 "$scratch/output" || fail "12+34= was not answered with 46"
}

case ${1-} in
headers | tiers | symbols | alone | pkg_config | find_package | engine | man) "$1" ;;
*) fail "no such check: '${1-}'" ;;
esac
