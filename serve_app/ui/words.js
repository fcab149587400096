// What the page says, in English and Chinese. A node keeps its key, so that another language can be put in at any time.

const ENGLISH = {
  "skip": "Skip to the content",
  "nav": "Views",
  "tab.play": "Playground",
  "tab.models": "Models",
  "tab.traffic": "Traffic",
  "language": "Language",
  "theme": "Colours",
  "theme.auto": "Auto",
  "theme.light": "Light",
  "theme.dark": "Dark",
  "close": "Close",
  "cancel": "Cancel",
  "copy": "Copy",
  "copied": "Copied",
  "about": "Switchyard {0} · configuration {1} · Router {2}",

  "link.connecting": "Connecting…",
  "link.live": "Live",
  "link.lost": "The server does not answer. Trying again in {0} s.",
  "link.trying": "The server does not answer. Trying again…",
  "link.back": "The server is back.",
  "link.locked": "A key is needed.",
  "link.refused": "The server refuses: {0} Trying again in {1} s.",
  "link.retry": "Try now",

  "key.button": "Key",
  "key.title": "API key",
  "key.text": "This service asks for a key. It stays in this browser tab and is forgotten with it.",
  "key.label": "Key",
  "key.use": "Use it",
  "key.forget": "Forget it",

  "error.network": "The server does not answer",
  "error.400": "The request is not right",
  "error.401": "The key is missing or not known",
  "error.403": "This is not allowed",
  "error.404": "There is no such thing",
  "error.408": "It took too long",
  "error.413": "The request is too large",
  "error.429": "Too many requests with this key",
  "error.503": "The service has no room now, or the model is not ready",
  "error.504": "The model did not answer in time",
  "error.other": "The service failed",
  "error.again": "Try again in {0} s.",
  "error.json": "{0}: this is not JSON",
  "error.array": "{0}: this must be a list",
  "error.object": "{0}: this must be an object",
  "error.range": "{0}: from {1} to {2}",
  "error.cut": "The answer ended before its end",

  "turns": "Conversation",
  "prompt": "Your message",
  "prompt.hint": "Enter sends, Shift+Enter begins a new line",
  "send": "Send",
  "stop": "Stop",
  "compare": "Compare thinking on and off",
  "fresh": "New conversation",
  "code": "As code",
  "settings": "Settings",
  "model": "Model",
  "model.auto": "auto (the router decides)",
  "thinking": "Thinking",
  "thinking.auto": "Auto",
  "thinking.on": "On",
  "thinking.off": "Off",
  "budget": "Budget of thinking, tokens",
  "budget.none": "no limit",
  "system": "System prompt",
  "temperature": "Temperature",
  "max": "Max tokens",
  "unset": "the model's own",
  "tools": "Tools (JSON)",
  "schema": "JSON schema of the answer",
  "empty": "Ask something. Beside each answer you see which model answered, whether it thought first, and why.",

  "you": "You",
  "tool.result": "Result of {0}",
  "tool.call": "Calls {0}",
  "tool.give": "Give the results",
  "side.on": "Thinking on",
  "side.off": "Thinking off",
  "side.keep": "Go on with this one",
  "side.kept": "The conversation goes on with this one",
  "state.sending": "Waiting for the first token…",
  "state.loading": "Loading: {0}",
  "state.stopped": "Stopped by you.",
  "state.length": "Cut at the maximum of tokens.",
  "state.done": "The answer is complete.",
  "reasoning": "Thinking",
  "reasoning.size": "Thinking · {0} tokens",

  "why": "Why",
  "why.model": "Model",
  "why.thinking": "Thinking",
  "why.budget": "Budget",
  "why.rule": "Rule",
  "why.score": "Score",
  "why.fallback": "Fallback",
  "why.warning": "Warning",
  "why.degraded": "Under load",
  "why.cold": "Cold start",
  "why.queue": "Queue",
  "why.decision": "Decision",
  "why.ttft": "First token",
  "why.tps": "Tokens/s",
  "why.tokens": "Tokens",
  "why.tokens.split": "{0} prompt ({1} cached), {2} thinking, {3} answer",
  "why.finish": "End",
  "why.steps": "Steps",
  "why.request": "Request",
  "why.policy": "Configuration",
  "by": "{0} · {1}",
  "on": "on",
  "off": "off",
  "tokens": "{0} tokens",

  "source.explicit": "you said so",
  "source.sticky": "as before in this conversation",
  "source.rule": "a rule",
  "source.scorer": "the scorer",
  "source.default": "the default",
  "source.constraint": "nothing else fits",
  "source.constraints": "nothing else fits",

  "tier.resident": "always loaded",
  "tier.lazy": "loaded on demand",
  "tier.external": "another server",
  "stage.hot": "hot",
  "stage.awake": "awake",
  "stage.loading": "loading",
  "stage.waking": "waking",
  "stage.asleep": "asleep",
  "stage.falling_asleep": "falling asleep",
  "stage.unloading": "unloading",
  "stage.stopped": "stopped",
  "stage.failed": "failed",
  "stage.away": "away",
  "pinned": "pinned",
  "default": "answers auto",
  "thinks": "can think",
  "running": "Running",
  "waiting": "Waiting",
  "queued": "Queued",
  "used": "Last used",
  "used.ago": "{0} ago",
  "used.now": "now",
  "used.never": "not yet",
  "wake": "Wake time",
  "context": "Context",
  "gpu": "GPU memory",
  "host": "Host memory",
  "memory": "{0} of {1} GB",
  "memory.one": "{0} GB",
  "replicas": "Replicas",
  "replica": "{0} on {1}: {2}",
  "nodes": "Nodes",
  "node": "{0}: {1} of {2} GPUs",
  "pool": "Pool of the models loaded on demand",
  "order.load": "Load",
  "order.sleep": "Sleep",
  "order.unload": "Unload",
  "order.pin": "Pin",
  "order.unpin": "Unpin",
  "order.of": "{0}: {1}",
  "order.done": "{0} has been told: {1}.",
  "sure.unload": "Unload {0}? {1} requests run on it; they are finished first. The next one waits for a load of about {2} s.",
  "sure.sleep": "Put {0} to sleep? {1} requests run on it; they are finished first.",
  "models.none": "No model is known yet.",

  "traffic.title": "The last 15 minutes",
  "chart.requests": "Requests/s",
  "chart.ttft": "Time to first token, ms",
  "chart.tpot": "Time per output token, ms",
  "chart.tokens": "Tokens/s",
  "chart.thinking": "Thinking, % of answers",
  "chart.failed": "Failed/s",
  "chart.refused": "Refused, by reason",
  "chart.sources": "Decided by",
  "chart.none": "None",
  "chart.label": "{0}: now {1}, highest {2}",
  "requests.title": "Latest requests",
  "requests.note": "From the audit, without any text of them. Open one to see where its time went.",
  "requests.none": "None yet.",
  "step.admit": "admit",
  "step.decide": "decide",
  "step.hold": "hold (the model loads)",
  "step.queue": "queue",
  "step.engine": "to the first token",
  "step.answer": "to the end",
  "timeline": "Where the time went",
};

const CHINESE = {
  "skip": "跳到正文",
  "nav": "视图",
  "tab.play": "试用",
  "tab.models": "模型",
  "tab.traffic": "流量",
  "language": "语言",
  "theme": "配色",
  "theme.auto": "自动",
  "theme.light": "浅色",
  "theme.dark": "深色",
  "close": "关闭",
  "cancel": "取消",
  "copy": "复制",
  "copied": "已复制",
  "about": "Switchyard {0} · 配置 {1} · 路由副本 {2}",

  "link.connecting": "正在连接…",
  "link.live": "实时",
  "link.lost": "服务器没有响应。{0} 秒后重试。",
  "link.trying": "服务器没有响应。正在重试…",
  "link.back": "服务器已恢复。",
  "link.locked": "需要密钥。",
  "link.refused": "服务器拒绝：{0} {1} 秒后重试。",
  "link.retry": "立即重试",

  "key.button": "密钥",
  "key.title": "API 密钥",
  "key.text": "此服务需要密钥。密钥只保存在这个浏览器标签页中，关闭即忘。",
  "key.label": "密钥",
  "key.use": "使用",
  "key.forget": "忘记密钥",

  "error.network": "服务器没有响应",
  "error.400": "请求有误",
  "error.401": "缺少密钥，或密钥未知",
  "error.403": "不允许",
  "error.404": "不存在",
  "error.408": "超时",
  "error.413": "请求过大",
  "error.429": "此密钥的请求过多",
  "error.503": "服务暂时没有空位，或模型尚未就绪",
  "error.504": "模型没有按时回答",
  "error.other": "服务出错",
  "error.again": "请在 {0} 秒后重试。",
  "error.json": "{0}：不是合法的 JSON",
  "error.array": "{0}：必须是列表",
  "error.object": "{0}：必须是对象",
  "error.range": "{0}：须在 {1} 到 {2} 之间",
  "error.cut": "回答没有结束就中断了",

  "turns": "对话",
  "prompt": "你的消息",
  "prompt.hint": "回车发送，Shift+回车换行",
  "send": "发送",
  "stop": "停止",
  "compare": "对比思考开与关",
  "fresh": "新对话",
  "code": "代码",
  "settings": "设置",
  "model": "模型",
  "model.auto": "auto（由路由决定）",
  "thinking": "思考",
  "thinking.auto": "自动",
  "thinking.on": "开",
  "thinking.off": "关",
  "budget": "思考预算（token）",
  "budget.none": "不限",
  "system": "系统提示词",
  "temperature": "温度",
  "max": "最多 token",
  "unset": "模型自己的值",
  "tools": "工具（JSON）",
  "schema": "回答的 JSON schema",
  "empty": "问点什么吧。每个回答旁边会说明由哪个模型回答、是否先思考，以及原因。",

  "you": "你",
  "tool.result": "{0} 的结果",
  "tool.call": "调用 {0}",
  "tool.give": "提交结果",
  "side.on": "思考：开",
  "side.off": "思考：关",
  "side.keep": "用这个继续",
  "side.kept": "对话将用这个回答继续",
  "state.sending": "等待第一个 token…",
  "state.loading": "正在加载：{0}",
  "state.stopped": "已被你停止。",
  "state.length": "达到最大 token 数，回答被截断。",
  "state.done": "回答已完成。",
  "reasoning": "思考",
  "reasoning.size": "思考 · {0} 个 token",

  "why": "原因",
  "why.model": "模型",
  "why.thinking": "思考",
  "why.budget": "预算",
  "why.rule": "规则",
  "why.score": "评分",
  "why.fallback": "退路",
  "why.warning": "警告",
  "why.degraded": "高负载",
  "why.cold": "冷启动",
  "why.queue": "排队",
  "why.decision": "决策",
  "why.ttft": "首个 token",
  "why.tps": "token/秒",
  "why.tokens": "token 数",
  "why.tokens.split": "提示 {0}（缓存 {1}），思考 {2}，回答 {3}",
  "why.finish": "结束",
  "why.steps": "步骤",
  "why.request": "请求",
  "why.policy": "配置",
  "by": "{0} · {1}",
  "on": "开",
  "off": "关",
  "tokens": "{0} 个 token",

  "source.explicit": "由你指定",
  "source.sticky": "沿用此对话",
  "source.rule": "规则",
  "source.scorer": "评分器",
  "source.default": "默认",
  "source.constraint": "只有它合适",
  "source.constraints": "只有它合适",

  "tier.resident": "常驻",
  "tier.lazy": "按需加载",
  "tier.external": "外部服务器",
  "stage.hot": "就绪",
  "stage.awake": "就绪",
  "stage.loading": "加载中",
  "stage.waking": "唤醒中",
  "stage.asleep": "休眠",
  "stage.falling_asleep": "正在休眠",
  "stage.unloading": "卸载中",
  "stage.stopped": "已停止",
  "stage.failed": "失败",
  "stage.away": "不在",
  "pinned": "已固定",
  "default": "回答 auto",
  "thinks": "可思考",
  "running": "运行中",
  "waiting": "等待",
  "queued": "排队",
  "used": "上次使用",
  "used.ago": "{0}前",
  "used.now": "现在",
  "used.never": "尚未使用",
  "wake": "唤醒时间",
  "context": "上下文",
  "gpu": "GPU 内存",
  "host": "主机内存",
  "memory": "{0} / {1} GB",
  "memory.one": "{0} GB",
  "replicas": "副本",
  "replica": "{0}，节点 {1}：{2}",
  "nodes": "节点",
  "node": "{0}：{2} 个 GPU，已用 {1}",
  "pool": "按需加载模型的资源池",
  "order.load": "加载",
  "order.sleep": "休眠",
  "order.unload": "卸载",
  "order.pin": "固定",
  "order.unpin": "取消固定",
  "order.of": "{1}：{0}",
  "order.done": "已通知 {0}：{1}。",
  "sure.unload": "卸载 {0}？有 {1} 个请求正在运行，会先完成。下一个请求需等待约 {2} 秒的加载。",
  "sure.sleep": "让 {0} 休眠？有 {1} 个请求正在运行，会先完成。",
  "models.none": "还没有已知的模型。",

  "traffic.title": "最近 15 分钟",
  "chart.requests": "请求/秒",
  "chart.ttft": "首个 token 时间，毫秒",
  "chart.tpot": "每个输出 token 时间，毫秒",
  "chart.tokens": "token/秒",
  "chart.thinking": "思考的回答，%",
  "chart.failed": "失败/秒",
  "chart.refused": "被拒绝（按原因）",
  "chart.sources": "决策来源",
  "chart.none": "没有",
  "chart.label": "{0}：现在 {1}，最高 {2}",
  "requests.title": "最新请求",
  "requests.note": "来自审计记录，不含任何文本。展开可看时间花在哪里。",
  "requests.none": "还没有。",
  "step.admit": "准入",
  "step.decide": "决策",
  "step.hold": "等待模型加载",
  "step.queue": "排队",
  "step.engine": "到首个 token",
  "step.answer": "到结束",
  "timeline": "时间花在哪里",
};

const TABLES = { en: ENGLISH, zh: CHINESE };
const ATTRIBUTES = ["aria-label", "placeholder"];
let now = "en";

export const language = () => now;

export function word(key, ...args) {
  const text = TABLES[now][key] ?? ENGLISH[key] ?? key;
  return text.replace(/\{(\d)\}/g, (_, place) => args[place] ?? "");
}

// The word for `prefix.name`, or the name itself where the service has a newer one.
export const named = (prefix, name) => (`${prefix}.${name}` in ENGLISH ? word(`${prefix}.${name}`) : name);

// An argument that begins with "@" is a key itself and changes its language, too.
const said = (key, args) => word(key, ...args.map((arg) => (String(arg).startsWith("@") ? word(arg.slice(1)) : arg)));

export function say(node, key, ...args) {
  const given = JSON.stringify(args);
  if (node.dataset.t === key && node.dataset.args === given) return node;
  node.dataset.t = key;
  node.dataset.args = given;
  node.textContent = said(key, args);
  return node;
}

// A text that is the same in all languages.
export function write(node, text) {
  delete node.dataset.t;
  if (node.textContent !== text) node.textContent = text;
  return node;
}

export function sayIn(node, attribute, key, ...args) {
  node.setAttribute(`data-t-${attribute}`, key);
  node.setAttribute(`data-args-${attribute}`, JSON.stringify(args));
  node.setAttribute(attribute, said(key, args));
  return node;
}

export function speak(chosen) {
  now = chosen in TABLES ? chosen : "en";
  document.documentElement.lang = now === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-t]")) {
    node.textContent = said(node.dataset.t, JSON.parse(node.dataset.args || "[]"));
  }
  for (const attribute of ATTRIBUTES) {
    for (const node of document.querySelectorAll(`[data-t-${attribute}]`)) {
      const args = JSON.parse(node.getAttribute(`data-args-${attribute}`) || "[]");
      node.setAttribute(attribute, said(node.getAttribute(`data-t-${attribute}`), args));
    }
  }
}

export const preferred = () => (navigator.languages?.[0] ?? navigator.language ?? "en").startsWith("zh") ? "zh" : "en";

export const number = (value, digits = 0) =>
  new Intl.NumberFormat(now === "zh" ? "zh-CN" : "en", { maximumFractionDigits: digits }).format(value);

// A duration in ms, as a person reads it.
export function duration(ms) {
  if (ms >= 60_000) return `${number(ms / 60_000, 1)} min`;
  if (ms >= 1000) return `${number(ms / 1000, 1)} s`;
  return `${number(ms, ms < 10 ? 1 : 0)} ms`;
}
