# bash completion for coxswain. The program itself says what may stand where the cursor is.
_coxswain() {
    local line words=() word piece i current
    # bash splits at = and :, and the program must not see that.
    for ((i = 1; i <= COMP_CWORD; i++)); do
        piece=${COMP_WORDS[i]}
        if ((${#words[@]})) && [[ $piece == = || (${COMP_WORDS[i - 1]} == = && $i -gt 2) ]]; then
            words[-1]+=$piece
        else
            words+=("$piece")
        fi
    done
    current=${COMP_WORDS[COMP_CWORD]}
    [[ $current == = ]] && current=
    # --name=VALUE is to the program --name VALUE.
    word=${words[-1]}
    if [[ $word == --*=* ]]; then
        words[-1]=${word%%=*}
        words+=("${word#*=}")
    fi
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
        :files) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
        :dirs) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
        *) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("${COMP_WORDS[0]}" __complete "${words[@]}" 2>/dev/null)
}
complete -F _coxswain coxswain
