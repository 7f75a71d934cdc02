"""What the checks of a trace find."""

from dataclasses import dataclass, field


@dataclass
class Findings:
    """What is wrong with a trace, and what follows from it; each check adds to it."""

    problems: list[str] = field(default_factory=list)  # make the trace untrustworthy
    notes: list[str] = field(default_factory=list)  # questions that the trace cannot answer
    unreliable: dict[str, str] = field(default_factory=dict)  # sections of the analysis, and why

    def doubt(self, why: str, *sections: str) -> None:
        """These sections are unreliable for this reason, whatever was found before."""
        for section in sections:
            self.unreliable[section] = why

    def doubt_too(self, why: str, section: str) -> None:
        """Beside the reasons that were found before."""
        known = self.unreliable.get(section)
        self.unreliable[section] = f"{known}; {why}" if known else why
