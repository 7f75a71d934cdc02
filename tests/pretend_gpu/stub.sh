# Sourced by the stubs in bin/, with their arguments: notes the call, and reads the tables.  Bash alone is needed, so
# that a PATH of stubs suffices.

HERE=$(readlink -f -- "${BASH_SOURCE[0]}") && HERE=${HERE%/*}
[ -z "${PRETEND_LOG:-}" ] || echo "${0##*/} $*" >>"$PRETEND_LOG"

fault() { case ",${PRETEND_FAULT:-}," in *,"$1",*) return 0 ;; esac && return 1; } # NAME: was it asked for?

row() { # FILE FIRST SECOND: sets ROW to the cells of the first line that begins so; an empty word stands for any
    local line
    while IFS= read -r line; do
        [[ $line != \#* ]] || continue
        IFS='|' read -ra ROW <<<"$line"
        local i
        for i in "${!ROW[@]}"; do read -r ROW[i] <<<"${ROW[i]}"; done
        if [ "${ROW[0]}" = "$2" ] && { [ -z "${3:-}" ] || [ "${ROW[1]}" = "$3" ]; }; then return 0; fi
    done <"$HERE/$1"
    return 1
}

card_of() { # amd | nvidia: sets the card's cells; fails for a card of the other maker, or none
    row cards.txt "${PRETEND_GPU:-}" || return 1
    case $1:${ROW[2]} in amd:gfx* | nvidia:sm_*) ;; *) return 1 ;; esac
    NAME=${ROW[1]} ARCH=${ROW[2]} CAPABILITY=${ROW[3]} UNITS=${ROW[4]} MEMORY=${ROW[6]} USED=${PRETEND_OTHER_MB:-${ROW[8]}}
    COUNT=${PRETEND_COUNT:-1}
}
