__doc__ = """\
Run the commands of docs/cases.md and of exercises 12 and 13 on this machine, and keep what they
print last in benchmarks/results/NAME/cases/.

python3 tools/record_cases.py NAME [CASE ...]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.run.startup import run_command


def main() -> None:
    from harness import PROJECT
    from harness.base.command_line import OneLineParser
    from harness.base.console import say
    from harness.base.errors import UserError
    from harness.machine.devices import choose_device
    from harness.machine.environment import describe_environment
    from tools.record_results import place_for
    from tools.texts.cases import CASES, answer_of, as_typed, log_name
    from workshop.exercise.results import machine

    parser = OneLineParser(prog="record_cases.py", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the machine, such as cpu-amd-epyc-2-threads")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="(all of them)")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]}: is none of {', '.join(CASES)}")
    environment = describe_environment(choose_device("auto")).as_json()
    for name_of_case in args.cases or CASES:
        case, shown = CASES[name_of_case], []
        for command in case.commands:
            with tempfile.TemporaryDirectory() as folder:
                typed = command.format(python=sys.executable, out=f"{folder}/out")
                done = subprocess.run(
                    typed, shell=True, cwd=PROJECT, capture_output=True, text=True, check=False
                )
            answer = answer_of(done.stdout, case.labels)
            if not answer:
                raise UserError(f"{typed}: no answer; {done.stderr.strip()[-200:]}")
            shown += [f"$ {as_typed(command, case)}", *answer]
            say(f"{name_of_case}: exit code {done.returncode}")
        path = place_for(args.name, log_name(name_of_case))
        shown.append(machine(environment))
        path.write_text("\n".join(shown).replace(f"{PROJECT}/", "") + "\n")


if __name__ == "__main__":
    run_command(main)
