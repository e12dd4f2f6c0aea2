"""Verbs that write a lab's config as others want it: `export serve` and `export kuberay`."""

from __future__ import annotations

from pathlib import Path

import click

from serving.cli.options import config_option, find_config, load_lab, naming
from serving.core.errors import TandemError
from serving.export import serve_config
from serving.export.kuberay import manifests
from serving.export.kuberay.objects import Cluster
from serving.scheduler.lane_costs import lane_costs_of


@click.group()
def export() -> None:
    """Write the lab's config for `serve deploy`, or for Kubernetes."""


@export.command(name="serve")
@config_option
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: standard output]")
def export_serve(config_file: Path | None, out: Path | None) -> None:
    """Write the Ray Serve config of the lab, for `serve deploy`.

    \b
    Examples:
      tandem export serve --config deploy/scale.yaml --out serve.yaml
    """
    path = find_config(config_file)
    lab = load_lab(path)
    with naming(path):
        lane_costs_of(lab)
    text = serve_config.serve_yaml(lab, str(path))
    if out is None:
        click.echo(text, nl=False)
    else:
        _write(out, text)


@export.command(name="kuberay")
@config_option
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write into.")
@click.option("--image", default="tandem:cpu", show_default=True, help="Image of every pod.")
@click.option("--namespace", default="tandem", show_default=True, help="Where all of it goes.")
@click.option(
    "--redis-address",
    default="tandem-redis:6379",
    show_default=True,
    help="host:port of the Redis that remembers the cluster when its head is lost.",
)
@click.option(
    "--datasource-uid",
    default="prometheus",
    show_default=True,
    help="Uid of the Prometheus datasource in your Grafana.",
)
def export_kuberay(config_file: Path | None, out: Path, **cluster_options: str) -> None:
    """Write manifests for Kubernetes with the KubeRay operator; see docs/kubernetes.md.

    \b
    Examples:
      tandem export kuberay --out manifests --image registry.example/tandem:1
      kubectl apply -k manifests
    """
    path = find_config(config_file)
    target = Cluster(**cluster_options)
    with naming(path):
        made = manifests.files(load_lab(path), target)
    for name, text in made.items():
        _write(out / name, text)


def _write(path: Path, text: str) -> None:
    """Raises: TandemError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TandemError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(path)
