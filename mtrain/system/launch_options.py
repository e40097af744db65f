"""The options that a plan passes to every launcher."""

from pydantic import BaseModel, ConfigDict, Field


class LaunchOptions(BaseModel):
    """The options that a plan passes to a launcher. A launcher's own ``Options`` class extends it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = Field(description="interpreter of the ranks")
    master_addr: str = Field("127.0.0.1", description="address of the first host")
    master_port: int = Field(29500, gt=0, lt=65536, description="rendezvous port on the first host")
    start_port: int | None = Field(None, gt=0, lt=65536, description="first port of the ranks; null: theirs to choose")
    threads: int = Field(1, gt=0, description="CPU threads per rank")
    devices: tuple[int, ...] | None = Field(None, description="device numbers on every host, () for the CPU; null: all")
    interface: str | None = Field(None, description="network interface of the collectives; null: left to them")
